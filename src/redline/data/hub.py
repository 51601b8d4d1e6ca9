"""Names on the Hugging Face Hub -> folders on the disk: org/name, or org/name@revision.

    folder = fetch_model("HuggingFaceTB/SmolLM2-135M-Instruct")      # safetensors, configuration, tokenizer
    files = fetch_data("openai/gsm8k@main")                          # Parquet, JSONL and JSON files
    corpus = fetch_corpus("hf://datasets/wikimedia/wikipedia/20231101.en")     # a folder of a data set

Files go into the Hub's own cache (`HF_HOME`), with its progress bars; what is there already is not fetched again.
Pickled weights are never fetched. `HF_ENDPOINT` names another server, `HF_TOKEN` opens gated models.
"""

import re
from pathlib import Path
from typing import Any

from redline.errors import DataError, need

_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "chat_template.jinja")
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.jsonl.gz")

CORPUS = "hf://datasets/"
"""The prefix of a corpus name on the Hub. A bare org/name would look like the folder data/corpus."""
CORPORA = {
    "wikitext-2": f"{CORPUS}Salesforce/wikitext/wikitext-2-raw-v1",
    "wikitext-103": f"{CORPUS}Salesforce/wikitext/wikitext-103-raw-v1",
    "wikipedia": f"{CORPUS}wikimedia/wikipedia/20231101.en",
}
"""Short names."""


def is_hub_name(place: str) -> bool:
    """Whether this may be org/name on the Hub: no such path here, and no folder of the first name."""
    is_file = place.endswith((".gguf", ".json", ".jsonl", ".parquet"))
    named = _NAME.fullmatch(place) is not None and not is_file
    return named and not Path(place).exists() and not Path(place).parent.is_dir()


def fetch_model(name: str) -> Path:
    return _fetch(name, "model", MODEL_FILES)


def fetch_data(name: str) -> Path:
    return _fetch(name, "dataset", DATA_FILES)


def fetch_corpus(name: str) -> Path:
    """hf://datasets/org/name/folder; the folder may be left out, and a revision may follow the name after an @."""
    org, _, rest = name.removeprefix(CORPUS).partition("/")
    repository, _, inside = rest.partition("/")
    patterns = tuple(f"{inside}/{pattern}" for pattern in DATA_FILES) if inside else DATA_FILES
    return _fetch(f"{org}/{repository}", "dataset", patterns) / inside


def _fetch(name: str, kind: str, patterns: tuple[str, ...]) -> Path:
    hub: Any = need("huggingface_hub", extra="hf")
    errors: Any = need("huggingface_hub.errors", extra="hf")
    httpx: Any = need("httpx", extra="hf")
    repository, _, revision = name.partition("@")
    try:
        folder = hub.snapshot_download(
            repository, repo_type=kind, revision=revision or None, allow_patterns=list(patterns)
        )
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        wrong = f"the Hugging Face Hub does not serve this {kind} ({_short(error)})"
        raise DataError(f"{name}: {wrong}; check the name, and for a gated one set HF_TOKEN") from error
    except (httpx.HTTPError, OSError) as error:
        wrong = f"not on this disk, and the Hugging Face Hub cannot be reached ({_short(error)})"
        raise DataError(f"{name}: {wrong}; give a path, or try again with a connection") from error
    return Path(folder)


def _short(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:160]
