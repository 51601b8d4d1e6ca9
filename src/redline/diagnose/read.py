"""From a path to Observed: which format it is, and the reader for it.

    observed = read(Path("runs/nano"))                 # or a log, a trainer_state.json, a CSV, a page of
                                                       claims
    observed = read(path, format="csv", columns={"step": "iteration"}, facts={"gpus": "8"})

To add a format: a function that recognises a text, one that reads it, and a line in FORMATS.
"""

import codecs
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from redline.config.recipe import Precision
from redline.diagnose import consoles, document, tables, trainer_state
from redline.diagnose.amounts import BYTES, COUNTS, amount
from redline.diagnose.observed import Facts, Observed
from redline.diagnose.own import read_run
from redline.errors import ConfigError, DataError, nearest
from redline.machine.specs import find_spec

MOST_BYTES = 512 * 2**20
"""A log is read whole; a larger file is refused before it fills the memory."""
WORDS = {
    "precision": get_args(Precision),
    "recompute": ("full", "selective", "on", "off"),
    "compile": ("on", "off"),
    "use_cache": ("true", "false"),
    "mfu_scope": ("the step", "the actor's update"),
}
"""Facts that are one of a few words."""
WHOLE = ("gpus", "batch_size", "micro_batch", "seq_len", "samples")

Reader = Callable[[str, str, Mapping[str, str]], Observed]


def _plain(reader: Callable[[str, str], Observed]) -> Reader:
    """A reader that takes no mapping of columns."""
    return lambda text, source, columns: reader(text, source)


def _table(name: str) -> Reader:
    return partial(_read_table, name)


def _read_table(name: str, text: str, source: str, columns: Mapping[str, str]) -> Observed:
    return tables.read_table(text, source, columns, name)


FORMATS: dict[str, tuple[Callable[[str], bool], Reader]] = {
    "hf": (trainer_state.is_trainer_state, _plain(trainer_state.read_trainer_state)),
    "verl": (consoles.is_verl, _plain(consoles.read_verl)),
    "torchtitan": (consoles.is_torchtitan, _plain(consoles.read_torchtitan)),
    "nanogpt": (consoles.is_nanogpt, _plain(consoles.read_nanogpt)),
    "jsonl": (tables.is_jsonl, _table("jsonl")),
    "lightning": (tables.is_lightning, _table("lightning")),
    "document": (document.is_document, _plain(document.read_document)),
    "csv": (tables.is_csv, _table("csv")),
}
"""In the order in which they are tried; `run`, a folder, is told by its files."""


def read(
    path: Path,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    facts: Mapping[str, str] | None = None,
) -> Observed:
    """Read whatever lies at `path`. `columns` is for CSV and JSONL; `facts` fills in, or overrules, what the
    log says of the run."""
    path = _file(path)
    if path.is_dir():
        if format not in (None, "run") or columns:
            raise ConfigError(f"{path} is a run folder, read as one: --format and --map are for log files")
        observed = read_run(path)
    else:
        text = _text(path)
        name = format or _detect(text, path)
        if name not in FORMATS:
            raise ConfigError(
                f"no format {name!r}{nearest(name, FORMATS)}; known: run (a folder), {', '.join(FORMATS)}"
            )
        if columns and name not in ("csv", "jsonl", "lightning"):
            raise ConfigError(f"--map is for csv, jsonl and lightning; {path} is read as {name}")
        observed = _read(name, text, path, columns or {})
    if not observed.steps and not observed.events and observed.format != "document":
        raise DataError(
            f"{path} holds no step that the reader for {observed.format} understands: choose another with"
            " --format"
        )
    return replace(observed, facts=replace(observed.facts, **_given(facts or {})))


def _read(name: str, text: str, path: Path, columns: Mapping[str, str]) -> Observed:
    """What a log written by hand or by another version can hold is without end: what a reader stumbles over
    is the file's fault."""
    try:
        return FORMATS[name][1](text, str(path), columns)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise DataError(
            f"{path} is not what the reader for {name} expects ({error!r}): choose another with --format"
        ) from error


def _file(path: Path) -> Path:
    """The file to read in a folder of the Trainer's; our own run folder stays one."""
    if not path.exists():
        raise DataError(f"{path} is not there: give a run folder or a log file")
    if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return path  # a folder that may not be read says so itself
    if any((path / name).exists() for name in ("metrics.jsonl", "events.jsonl")):
        return path
    states = [
        path / "trainer_state.json",
        *sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step, reverse=True),
    ]
    for state in [*states, path / "metrics.csv"]:
        if state.exists():
            return state
    if rounds := len(list(path.glob("round-*/events.jsonl"))):
        raise DataError(f"{path} holds {rounds} rounds: name one of them, {path / 'round-1'} and so on")
    raise DataError(
        f"{path} is no run folder: there is no metrics.jsonl, trainer_state.json or metrics.csv in it; give"
        " the log file itself"
    )


def _checkpoint_step(path: Path) -> int:
    return int(re.sub(r"\D", "", path.parent.name) or 0)


def _text(path: Path) -> str:
    if path.stat().st_size > MOST_BYTES:
        raise DataError(
            f"{path} has {path.stat().st_size / 2**20:,.0f} MiB, more than {MOST_BYTES / 2**20:.0f}: cut out"
            " a part of it"
        )
    raw = path.read_bytes()
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    if encoding != "utf-16" and b"\0" in raw[:4096]:
        raise DataError(f"{path} is not text: give the log, not a checkpoint or an archive")
    text = raw.decode(encoding, errors="replace")  # a console log may hold anything
    if not text.strip():
        raise DataError(f"{path} is empty: the trainer has written nothing into it yet")
    return text


def _detect(text: str, path: Path) -> str:
    for name, (recognises, _) in FORMATS.items():
        if recognises(text):
            return name
    raise DataError(f"{path} is in no format that is known ({', '.join(FORMATS)}): say which with --format")


def _given(facts: Mapping[str, str]) -> dict[str, Any]:
    kinds = {field.name: str(field.type) for field in fields(Facts)}
    given: dict[str, Any] = {}
    for name, raw in facts.items():
        if name not in kinds:
            raise ConfigError(
                f"--fact knows no {name!r}{nearest(name, kinds)}; it may name {', '.join(kinds)}"
            )
        given[name] = _word(name, raw) if kinds[name].startswith("str") else _number(name, raw)
    return given


def _word(name: str, raw: str) -> str:
    if name == "gpu":
        return find_spec(raw).name
    if name in WORDS and raw not in WORDS[name]:
        raise ConfigError(
            f"--fact {name} is one of {', '.join(WORDS[name])}, got {raw!r}{nearest(raw, WORDS[name])}"
        )
    return raw


def _number(name: str, raw: str) -> float:
    units, example = (BYTES, "80GB or 80GiB") if name == "memory_bytes" else (COUNTS, "8, 454M or 1.24e8")
    value = amount(raw, units)
    if value is None or (name in WHOLE and not value.is_integer()):
        raise ConfigError(
            f"--fact {name} needs one {'whole ' if name in WHOLE else ''}number above 0 such as {example},"
            f" got {raw!r}"
        )
    return value
