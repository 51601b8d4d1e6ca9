"""From a path to Observed: a run folder of ours, another trainer's log in whatever form, or a page of claims.

# or a log, a trainer_state.json, a CSV, a notebook, a TensorBoard event file, a Markdown page
observed = read(Path("runs/nano"))
observed = read(path, columns={"step": "iteration"}, facts={"gpus": "8"})
"""

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from redline.diagnose.observed import Facts, Observed
from redline.diagnose.readers.cells import BYTES, COUNTS, amount
from redline.diagnose.readers.document import read_document
from redline.diagnose.readers.files import text_of
from redline.diagnose.readers.log import read_log
from redline.diagnose.readers.own import read_run
from redline.errors import ConfigError, DataError, nearest
from redline.machine.specs import find_spec

WHOLE = ("gpus", "batch_size", "micro_batch", "seq_len", "samples", "accumulation")
LOGS = ("trainer_state.json", "trainer_log.jsonl", "logging.jsonl", "metrics.csv")
"""What is read in a folder of another trainer, in this order."""


def read(
    path: Path, *, columns: Mapping[str, str] | None = None, facts: Mapping[str, str] | None = None
) -> Observed:
    """Read whatever is at `path`. `columns` names columns of a log; `facts` fills in, or overrules, what it says."""
    path, given = _file(path), _given(facts or {})
    if path.is_dir():
        if columns:
            raise ConfigError(f"{path} is a run folder of ours: --map is for logs of other trainers")
        observed: Observed | None = read_run(path)
    else:
        observed = read_log(path, columns or {}, given)
    if observed is None and not columns:
        observed = read_document(text_of(path), str(path))
    if observed is None or (not observed.steps and observed.format == "run" and not observed.events):
        raise DataError(
            f"{path} shows no training: no line with a step that grows together with a loss or a time. Give the trainer's own log, or"
            " name the columns of a table with --map step=COLUMN,step_s=COLUMN:UNIT"
        )
    return replace(observed, facts=replace(observed.facts, **given))


def _file(path: Path) -> Path:
    """The file to read in a folder of another trainer; our own run folder stays one."""
    try:
        if not path.exists():
            raise DataError(f"{path} does not exist: give a run folder or a log file")
        if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
            return path  # an unreadable folder raises its own error
        if any((path / name).exists() for name in ("metrics.jsonl", "events.jsonl")):
            return path
        checkpoints = list(path.glob(f"checkpoint-*/{LOGS[0]}"))
        checkpoints.sort(key=lambda log: int(re.sub(r"\D", "", log.parent.name)[:12] or 0), reverse=True)
        others = [*(path / name for name in LOGS[1:]), *sorted(path.glob("*tfevents*"))]
        if log := next((log for log in (path / LOGS[0], *checkpoints, *others) if log.exists()), None):
            return log
        if rounds := len(list(path.glob("round-*/events.jsonl"))):
            raise DataError(f"{path} holds {rounds} rounds: name one of them, {path / 'round-1'} and so on")
    except (OSError, ValueError) as refusal:
        why = getattr(refusal, "strerror", None) or refusal
        raise DataError(f"{str(path)!r} cannot be read: {why}") from refusal
    known = f"metrics.jsonl, {', '.join(LOGS)} or TensorBoard file"
    raise DataError(f"{path} is not a run folder: it has no {known}; give the log file itself")


def _given(facts: Mapping[str, str]) -> dict[str, Any]:
    kinds = {field.name: field.type for field in fields(Facts)}
    given: dict[str, Any] = {}
    for name, raw in facts.items():
        if name not in kinds:
            near = nearest(name, kinds)
            raise ConfigError(f"--fact does not know {name!r}{near}; it takes {', '.join(kinds)}")
        given[name] = _number(name, raw) if float in get_args(kinds[name]) else _word(name, raw, kinds[name])
    return given


def _word(name: str, raw: str, kind: Any) -> str:
    if name == "gpu":
        return find_spec(raw).name
    # Literal[...] or Literal[...] | None
    words = [word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str)]
    if words and raw not in words:
        raise ConfigError(f"--fact {name} is one of {', '.join(words)}, got {raw!r}{nearest(raw, words)}")
    return raw


def _number(name: str, raw: str) -> float:
    units, example = (BYTES, "80GB or 80GiB") if "memory" in name else (COUNTS, "8, 454M or 1.24e8")
    value = amount(raw, units)
    if not value or (name in WHOLE and not value.is_integer()):
        kind = "whole number" if name in WHOLE else "number"
        raise ConfigError(f"--fact {name} needs one {kind} above 0 such as {example}, got {raw!r}")
    return value
