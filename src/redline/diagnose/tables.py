"""Logs that are tables: Hugging Face's trainer_state.json, Lightning's metrics.csv, and any CSV or JSONL with a mapping.

`--map step=iteration,step_s=dt_ms` names the columns; a column whose name ends in `_ms` is read as milliseconds, and said so.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from redline.diagnose.observed import Facts, Observed, Step
from redline.errors import ConfigError, DataError, nearest

MAPPABLE = (*(field.name for field in fields(Step) if field.name != "parts_s"), "tokens_per_s")
_SYNONYMS = {
    "step": ("step", "global_step", "iter", "iteration", "trainer/global_step"),
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "train_loss_step"),
    "step_s": ("step_s", "step_time", "step_time_s", "time_per_step", "iter_time", "dt_ms", "step_ms", "step_time_ms", "iter_ms"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_sec", "tokens/sec", "tok/s", "tps", "throughput", "train|device/items_per_sec"),
    "mfu": ("mfu", "train/mfu", "train|device/mfu"),
    "memory_bytes": ("memory_bytes", "peak_memory_bytes"),
    "data_wait_s": ("data_wait_s", "data_time", "data_loading_s"),
    "elapsed_s": ("elapsed_s", "elapsed", "time_s", "train|time", "wall_time"),
}


def is_trainer_state(text: str) -> bool:
    return text.lstrip().startswith("{") and '"log_history"' in text


def read_trainer_state(text: str, source: str) -> Observed:
    """Hugging Face's Trainer. Times of single updates stand in it only with `include_num_input_tokens_seen`; else the run's mean does."""
    state = _json(text, source)
    history = [entry for entry in state["log_history"] if isinstance(entry, dict)]
    steps, before, last = [], {"step": 0, "train_runtime": 0.0, "num_input_tokens_seen": 0}, {}
    for entry in history:
        if "train_samples_per_second" in entry or "train_steps_per_second" in entry:
            last = entry
        elif "loss" in entry:
            steps.append(_hf_step(entry, before))
            before = {name: entry.get(name, before[name]) for name in before}
    if last and not any(s.step_s for s in steps) and last.get("train_steps_per_second"):
        # The mean of the whole run, first step and evaluations included: all there is.
        mean_s, tokens = 1 / last["train_steps_per_second"], _share(state.get("num_input_tokens_seen"), state.get("global_step"))
        steps = [Step(step=s.step, loss=s.loss, step_s=mean_s, tokens=tokens) for s in steps] or [
            Step(step=state["global_step"], step_s=mean_s, tokens=tokens)
        ]
    facts = Facts(
        batch_size=_share((last.get("train_samples_per_second") or 0) or None, last.get("train_steps_per_second")),
        micro_batch=state.get("train_batch_size"),
        flops_per_token=_share(state.get("total_flos") or None, state.get("num_input_tokens_seen") or None),
    )
    repairs = ("num_input_tokens_seen counts padding unless include_num_input_tokens_seen is 'non_padding'",)
    return Observed(source=source, format="hf", steps=tuple(steps), facts=facts, repairs=repairs)


def _hf_step(entry: Mapping[str, Any], before: Mapping[str, Any]) -> Step:
    done = max(1, entry["step"] - before["step"])
    timed = "train_runtime" in entry and entry["train_runtime"] > before["train_runtime"]
    seen = "num_input_tokens_seen" in entry
    return Step(
        step=entry["step"],
        loss=entry["loss"],
        step_s=(entry["train_runtime"] - before["train_runtime"]) / done if timed else None,
        tokens=(entry["num_input_tokens_seen"] - before["num_input_tokens_seen"]) / done or None if seen else None,
        elapsed_s=entry.get("train_runtime"),
    )


def _share(amount: float | None, count: float | None) -> float | None:
    return amount / count if amount and count else None


def is_lightning(text: str) -> bool:
    head = text.partition("\n")[0].strip().split(",")
    return "step" in head and "epoch" in head


def is_csv(text: str) -> bool:
    head = text.partition("\n")[0]
    return "," in head and not head.lstrip().startswith(("{", "#", "|", "-")) and len(head.split(",")) == len(_second(text).split(","))


def is_jsonl(text: str) -> bool:
    return text.lstrip().startswith("{") and '"log_history"' not in text


def _second(text: str) -> str:
    return [*text.splitlines(), "", ""][1]


def read_table(text: str, source: str, columns: Mapping[str, str], name: str) -> Observed:
    """A CSV (`name` csv or lightning) or JSONL file; `columns` maps our names to its own."""
    if name == "jsonl":
        rows: Sequence[Mapping[str, Any]] = json_lines(text, source)
    else:
        rows = list(csv.DictReader(text.splitlines()))
    present = {key for row in rows for key in row if key is not None}  # csv's name for the cells beyond the last column
    chosen = _choose(columns, present, source)
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        values = {ours: value for ours, theirs in chosen.items() if (value := _value(row.get(theirs))) is not None}
        if "step" in values:  # Lightning writes training and validation of one step on separate lines
            found.setdefault(int(values.pop("step")), {}).update(values)
    repairs = [f"{theirs} is read as milliseconds" for theirs in chosen.values() if theirs.endswith("_ms")]
    scale = {ours: 1e-3 if theirs.endswith("_ms") else 1.0 for ours, theirs in chosen.items()}
    steps, before = [], None
    for step in sorted(found):
        values = {ours: value * scale[ours] for ours, value in found[step].items()}
        steps.append(_step(step, values, before))
        before = (step, values["elapsed_s"]) if "elapsed_s" in values else before
    if steps and any((s.mfu or 0) > 1 for s in steps) and all((s.mfu or 0) < 100 for s in steps):
        steps = [Step(**{**vars(s), "mfu": s.mfu / 100 if s.mfu is not None else None}) for s in steps]
        repairs.append("mfu is in per cent")
    return Observed(source=source, format=name, steps=tuple(steps), repairs=tuple(repairs))


def _step(step: int, values: dict[str, float], before: tuple[int, float] | None) -> Step:
    speed = values.pop("tokens_per_s", None)
    if "step_s" not in values and "elapsed_s" in values and before is not None:
        values["step_s"] = (values["elapsed_s"] - before[1]) / max(1, step - before[0])
    if speed and "tokens" not in values and "step_s" in values:
        values["tokens"] = speed * values["step_s"]
    elif speed and "step_s" not in values:
        values |= {"step_s": values.get("tokens", speed) / speed, "tokens": values.get("tokens", speed)}
    return Step(step=step, **values)  # type: ignore[arg-type]


def _choose(columns: Mapping[str, str], present: set[str], source: str) -> dict[str, str]:
    for ours, theirs in columns.items():
        if ours not in MAPPABLE:
            raise ConfigError(f"--map knows no {ours!r}{nearest(ours, MAPPABLE)}; it may name {', '.join(MAPPABLE)}")
        if theirs not in present:
            raise ConfigError(f"{source} has no column {theirs!r}{nearest(theirs, present)}; it has {', '.join(sorted(present))}")
    guessed = {ours: name for ours, names in _SYNONYMS.items() for name in reversed(names) if name in present}
    chosen = {**guessed, **columns}
    if "step" not in chosen:
        raise ConfigError(
            f"{source}: which column is the step? Say it with --map step=COLUMN; it has {', '.join(sorted(present)) or 'none'}"
        )
    return chosen


def _value(raw: Any) -> float | None:
    try:
        value = float(raw)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def json_lines(text: str, source: str) -> list[dict[str, Any]]:
    """Every line as a table; half a last line (the trainer is still writing) is left out."""
    whole = [line for line in text.splitlines(keepends=True) if line.strip()]
    if len(whole) > 1 and not whole[-1].endswith("\n") and not whole[-1].rstrip().endswith("}"):
        whole.pop()
    return [_json(line, source) for line in whole]


def _json(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{source} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{source}: a table is needed on each line, got {type(value).__name__}")
    return value
