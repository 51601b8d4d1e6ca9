"""GURU's Parquet files as questions of our domains.

    files = guru_files(folder, "math")        # {"train": ("train/math__combined_54.4k.parquet",), …}

A file is named `<domain>__<set>_<size>.parquet`; a row has data_source, prompt (messages), ability,
reward_model {ground_truth, style} and extra_info. `data_source` says how the ground truth is to be read; from
there on the domain's own scorer judges. Files under folders named like online_eval or test are held out, and
where there are none a hash holds out a tenth each. Rows are left out whose tests cannot be run without showing
the expected result to the program (docs/tasks.md), and input prediction (cruxeval-i), which has many right answers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.errors import DataError
from redline.tasks.asserts import from_asserts
from redline.tasks.task import Question

PREFIXES = {
    "math": "math",
    "codegen": "code",
    "logic": "logic",
    "simulation": "simulation",
    "table": "tables",
    "stem": "science",
}
"""The domain that a file name or data source belongs to."""
_HELD_OUT = {"valid": ("online_eval", "valid", "validation", "eval"), "test": ("test", "offline_eval")}
_PUZZLES = ("zebra_puzzle", "ordering_puzzle", "graph_logical")
"""Data sources of logic that were named before the prefixes."""


def guru_files(folder: Path, domain: str) -> dict[str, tuple[str, ...]]:
    """The files of the domain by split, relative to the folder; none: these are not files of GURU."""
    found: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for path in sorted(folder.rglob("*__*.parquet")):
        if PREFIXES.get(path.name.partition("__")[0]) == domain:
            inner = path.relative_to(folder)
            split = next((s for s, names in _HELD_OUT.items() if set(inner.parts[:-1]) & set(names)), "train")
            found[split].append(str(inner))
    if not any(found.values()):
        return {}
    held_out = found["valid"] or found["test"] or found["train"]
    return {split: tuple(paths or held_out) for split, paths in found.items()}


def guru_question(domain: str, name: str, fields: Mapping[str, Any]) -> Question | None:
    """A row as a question of the domain; None if it belongs to another domain or cannot be scored here."""
    match fields:
        case {"data_source": str(source), "reward_model": {"ground_truth": truth}} if truth is not None:
            prefix = "logic" if source.startswith(_PUZZLES) else source.partition("_")[0]
            if PREFIXES.get(prefix) != domain:
                return None
            extra = fields.get("extra_info") or {}
            try:
                text, answer = _prompt(fields, extra), _answer(source, truth, extra)
            except (ValueError, TypeError, AttributeError) as error:
                raise DataError(f"{name}: a ground truth of {source} lacks GURU's form: {error}") from error
            return Question(name, text, answer, "", {"kind": source}) if text and answer else None
    return None


def _prompt(fields: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    messages = fields.get("prompt") or []
    said = [str(message["content"]) for message in messages if message.get("role") != "assistant"]
    return "\n\n".join(said) or str(extra.get("prompt") or fields.get("raw_prompt") or "")


def _answer(source: str, truth: Any, extra: Mapping[str, Any]) -> str | None:
    """The ground truth as the domain's scorer reads it."""
    if source.startswith("codegen"):
        return _tests(json.loads(truth), extra)
    if source.startswith("simulation__codeio"):
        text = str(truth).strip()
        read = json.loads(text if text.startswith("{") else f"{{{text}}}")
        return json.dumps(read.get("output", read.get("input", read)))
    if source.startswith("simulation__cruxeval-i") or (isinstance(truth, str) and '"functional"' in truth):
        return None
    return truth if isinstance(truth, str) else json.dumps(truth)


def _tests(tests: Mapping[str, Any], extra: Mapping[str, Any]) -> str | None:
    match tests:
        case {"functional": str(source)}:
            return from_asserts(source, str(extra.get("prefix") or ""))
        case {"inputs": [str(), *_] as inputs, "outputs": [str(), *_] as outputs} if len(inputs) == len(
            outputs
        ):
            return json.dumps({"inputs": inputs, "outputs": outputs})
    return None
