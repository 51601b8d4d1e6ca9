"""The server engine against a real server: `transformers serve` on loopback, with a tiny Llama that we
export. Truth: its own generate."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
import transformers
from transformers.utils.import_utils import is_serve_available

from redline.config.recipe import ModelConfig
from redline.data.read import SHIPPED
from redline.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from redline.engine.request import Completion, Request, Sampling
from redline.engine.server import TRANSFORMERS, ServerEngine
from redline.errors import ConfigError
from redline.launch.processes import reserved_port
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.model.weights import Loaded

pytestmark = pytest.mark.skipif(
    not is_serve_available(), reason="transformers serve needs fastapi, uvicorn and openai"
)

CONFIG = ModelConfig(
    vocab_size=384, num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, ffn_size=64,
    context_length=128, init_std=0.3,
    tie_embeddings=False,
)  # fmt: skip
PROMPTS = ("ROMEO: what light", "The", "O, I am slain! And now")
START_LIMIT_S = 300
SERVE = "from transformers.cli.transformers import main; main()"


@dataclass(frozen=True)
class Served:
    url: str
    folder: Path
    tokenizer: Tokenizer

    def run(self, *requests: Request, concurrency: int = 4) -> list[Completion]:
        with ServerEngine(
            self.url, str(self.folder), concurrency=concurrency, tokenizer=self.tokenizer
        ) as engine:
            assert engine.dialect is TRANSFORMERS
            return list(engine.run(requests))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = train_bpe(iter([SHIPPED["tinyshakespeare"].read_text()[:100_000]]), CONFIG.vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    weights = build_model(CONFIG, device="cpu", seed=0).state_dict()
    text = (folder / "tokenizer.json").read_text()
    write_folder(
        folder / "tiny",
        Loaded(config=CONFIG, weights=weights, tokenizer_json=text, eos_ids=(tokenizer.eot_id,)),
        torch.float32,
    )
    # A Hugging Face home of its own: without a cache in it, the server's list of models fails, as on a fresh
    # machine.
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with reserved_port() as port, (folder / "log").open("wb") as log:
        where = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        command = [sys.executable, "-c", SERVE, "serve", str(folder / "tiny"), *where]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", folder / "log")
            yield Served(f"http://127.0.0.1:{port}", folder / "tiny", load_tokenizer(folder))
        finally:
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    started_s = time.monotonic()
    while server.poll() is None and time.monotonic() - started_s < START_LIMIT_S:
        try:
            with urlopen(url, timeout=60):
                return
        except OSError:  # nobody listens yet, or hangs up, or takes long
            time.sleep(0.1)
    pytest.fail(f"transformers serve did not start: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def greedy(served: Served) -> dict[str, str]:
    """What `transformers` itself generates from each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(served.folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(served.folder)
    texts = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        texts[prompt] = tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def test_greedy_text_is_that_of_transformers(served: Served, greedy: dict[str, str]) -> None:
    sampling = Sampling(max_new_tokens=16, temperature=0.0)
    found = served.run(*(Request(prompt=prompt, sampling=sampling, tag=prompt) for prompt in PROMPTS))
    assert {completion.request.tag: completion.text for completion in found} == greedy
    assert len(set(greedy.values())) == len(PROMPTS)


def test_a_prompt_of_token_ids_becomes_text(served: Served, greedy: dict[str, str]) -> None:
    ids = tuple(served.tokenizer.encode([PROMPTS[0]])[0])
    [found] = served.run(Request(prompt=ids, sampling=Sampling(max_new_tokens=16, temperature=0.0)))
    assert found.text == greedy[PROMPTS[0]]


def test_samples_differ_by_their_number_and_repeat_by_their_seed(
    served: Served, greedy: dict[str, str]
) -> None:
    """It really samples: the server's own default is greedy whatever the temperature."""
    request = Request(
        prompt=PROMPTS[0], sampling=Sampling(max_new_tokens=16, temperature=1.0), samples=4, seed=7
    )
    texts = [completion.text for completion in served.run(request, concurrency=1)]
    assert len({*texts, greedy[PROMPTS[0]]}) == 5
    assert [completion.text for completion in served.run(request, concurrency=1)] == texts


def test_top_k_reaches_the_sampler(served: Served, greedy: dict[str, str]) -> None:
    [found] = served.run(
        Request(prompt=PROMPTS[0], sampling=Sampling(max_new_tokens=16, temperature=1.0, top_k=1))
    )
    assert found.text == greedy[PROMPTS[0]], "the one likeliest token is the greedy one"


def test_a_stop_text_ends_the_completion_and_is_cut_off(served: Served, greedy: dict[str, str]) -> None:
    text = greedy[PROMPTS[1]]
    stop = text[6:8]
    [found] = served.run(
        Request(
            prompt=PROMPTS[1], sampling=Sampling(max_new_tokens=16, temperature=0.0, stop_strings=(stop,))
        )
    )
    assert (found.text, found.finish) == (text[: text.index(stop)], "stop")


def test_another_model_is_refused_in_one_line(served: Served) -> None:
    with (
        ServerEngine(served.url, "no/such") as engine,
        pytest.raises(ConfigError, match="refused /completions: 400") as caught,
    ):
        list(engine.run([Request(prompt="a", sampling=Sampling())]))
    assert "no/such" in str(caught.value)
    assert "\n" not in str(caught.value)
