"""Logs that are tables: Lightning's metrics.csv, and any CSV or JSONL with a mapping.

`--map step=iteration,step_s=dt:ms` names the columns, with the unit behind a colon; a column whose name ends in `_ms` is read as
milliseconds without one, and said so.
"""

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from redline.diagnose.amounts import BYTES, COUNTS, SECONDS, SHARES, finite, number
from redline.diagnose.observed import Facts, Observed, Step
from redline.errors import ConfigError, DataError, nearest

MAPPABLE = (*(field.name for field in fields(Step) if field.name not in ("parts_s", "not_a_number")), "tokens_per_s")
_SEPARATORS = ("/", "|")
"""Of the names that Lightning's ThroughputMonitor writes: the first is its default."""
_SYNONYMS = {
    "step": ("step", "global_step", "iter", "iteration", "trainer/global_step"),
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "train_loss_step"),
    "step_s": ("step_s", "step_time", "step_time_s", "time_per_step", "iter_time", "dt_ms", "step_ms", "step_time_ms", "iter_ms"),
    "tokens_per_s": (
        *("tokens_per_s", "tokens_per_sec", "tokens/sec", "tok/s", "tps", "throughput"),
        *(f"train{sep}items_per_sec" for sep in _SEPARATORS),
        *(f"train{sep}device{sep}items_per_sec" for sep in _SEPARATORS),
    ),
    "mfu": ("mfu", "train/mfu", *(f"train{sep}device{sep}mfu" for sep in _SEPARATORS)),
    "memory_bytes": ("memory_bytes", "peak_memory_bytes"),
    "data_wait_s": ("data_wait_s", "data_time", "data_loading_s"),
    "elapsed_s": ("elapsed_s", "elapsed", "time_s", "wall_time", *(f"train{sep}time" for sep in _SEPARATORS)),
}
_MOST_MFU = 2.0
"""A column of shares never holds as much, not even a wrong one; a column in per cent holds more than that."""


@dataclass(frozen=True)
class _Column:
    name: str
    factor: float = 1.0
    told: bool = False
    """Whether its unit was given."""


def is_lightning(text: str) -> bool:
    head = _head(text)
    cells = head.strip().split(_delimiter(head))
    return "step" in cells and "epoch" in cells


def is_csv(text: str) -> bool:
    head, mark = _head(text), _delimiter(_head(text))
    return mark in head and not head.lstrip().startswith(("{", "#", "|", "-")) and head.count(mark) == _second(text).count(mark)


def is_jsonl(text: str) -> bool:
    return text.lstrip().startswith("{") and '"log_history"' not in text


def _head(text: str) -> str:
    return text.partition("\n")[0]


def _second(text: str) -> str:
    return text.partition("\n")[2].partition("\n")[0]


def _delimiter(head: str) -> str:
    """What a spreadsheet put between the cells: where a comma is the decimal point it is a semicolon."""
    return max(",;\t", key=head.count)


def read_table(text: str, source: str, columns: Mapping[str, str], name: str) -> Observed:
    """A CSV (`name` csv or lightning) or JSONL file; `columns` maps our names to its own."""
    rows: Sequence[Mapping[str, Any]] = json_lines(text, source) if name == "jsonl" else _csv_rows(text, source)
    present = {key for row in rows for key in row if key is not None}  # csv's name for the cells beyond the last column
    chosen = _choose(columns, present, source)
    found, lost = _values(rows, chosen, source)
    repairs = [f"{c.name} is read as milliseconds" for c in chosen.values() if c.name.endswith("_ms") and not c.told]
    gpus, note = _one_gpu(rows, chosen)
    repairs += note
    steps, before = [], None
    for step in sorted(found):
        values = found[step]
        if "device" in chosen.get("tokens_per_s", _Column("")).name and "tokens_per_s" in values:
            values["tokens_per_s"] *= gpus or 1
        elapsed_s = values.get("elapsed_s")
        steps.append(_step(step, values, before, lost=step in lost))
        before = (step, elapsed_s) if elapsed_s is not None else before
    if "mfu" in chosen and not chosen["mfu"].told and any((s.mfu or 0) >= _MOST_MFU for s in steps):
        steps = [replace(s, mfu=s.mfu / 100 if s.mfu is not None else None) for s in steps]
        repairs.append("mfu is in per cent")
    if not any(s.step_s for s in steps) and (unread := sorted(present - {c.name for c in chosen.values()})):
        repairs.append(f"columns that are not read: {', '.join(unread)}")
    return Observed(
        source=source,
        format=name,
        steps=tuple(steps),
        facts=Facts(gpus=gpus),
        repairs=tuple(repairs),
        lines_are_means="step_s" not in chosen,
    )


def _values(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, _Column], source: str) -> tuple[dict[int, dict[str, float]], set[int]]:
    """What each step holds in our units, and the steps whose loss is no number. Lightning writes training and validation of one step on
    separate lines, and its validation's batches under numbers of their own, which hold nothing of ours."""
    found: dict[int, dict[str, float]] = {}
    lost: set[int] = set()
    for row in rows:
        if (step := finite(row.get(chosen["step"].name))) is None:
            continue
        values = {
            ours: value * column.factor
            for ours, column in chosen.items()
            if ours != "step" and (value := finite(row.get(column.name))) is not None
        }
        for ours, value in values.items():
            if value < 0 and ours not in ("loss", "mfu"):
                raise DataError(
                    f"{source}: {chosen[ours].name} is {value:g} at step {step:.0f}, and {ours} cannot be negative: "
                    f"name another column with --map {ours}=COLUMN"
                )
        wrong = "loss" in chosen and _no_number(row, chosen["loss"].name)
        if values or wrong:
            found.setdefault(int(step), {}).update(values)
        if wrong:
            lost.add(int(step))
    return found, {step for step in lost if "loss" not in found[step]}


def _no_number(row: Mapping[str, Any], name: str) -> bool:
    """Whether a loss was written that is none: nan, inf, or JSON's null for them, but not on a line of a validation, which has no loss."""
    raw = row.get(name, "")
    if raw is None and isinstance(row, dict) and name in row:
        return not any(value is not None for key, value in row.items() if re.search(r"val|eval", str(key)))
    value = number(raw)
    return value is not None and not math.isfinite(value)


def _step(step: int, values: dict[str, float], before: tuple[int, float] | None, *, lost: bool) -> Step:
    speed = values.pop("tokens_per_s", None)
    if "step_s" not in values and "elapsed_s" in values and before is not None and values["elapsed_s"] > before[1]:
        values["step_s"] = (values["elapsed_s"] - before[1]) / max(1, step - before[0])
    if speed and "tokens" not in values and "step_s" in values:
        values["tokens"] = speed * values["step_s"]
    elif speed and "step_s" not in values:
        values |= {"step_s": values.get("tokens", speed) / speed, "tokens": values.get("tokens", speed)}
    if values.get("mfu", 0.0) < 0:
        values.pop("mfu")
    return Step(step=step, not_a_number=lost, **values)  # type: ignore[arg-type]


def _one_gpu(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, _Column]) -> tuple[float | None, list[str]]:
    """How many GPUs Lightning's speed is of, and what is to be said of it. It writes the names without `device` only where there are
    several; what it calls items is what its `length_fn` counts."""
    column = chosen.get("tokens_per_s", _Column("")).name
    if (named := re.fullmatch(r"train([/|])(device\1)?items_per_sec", column)) is None:
        return None, []
    sep, ratios = named[1], []
    for row in rows:
        for rate in ("samples_per_sec", "batches_per_sec"):
            both, one = finite(row.get(f"train{sep}{rate}")), finite(row.get(f"train{sep}device{sep}{rate}"))
            if both and one:
                ratios.append(both / one)
    several = named[2] is None or any(f"train{sep}samples_per_sec" in row for row in rows)
    gpus = float(round(median(ratios))) if ratios else None if several else 1.0
    note = f"{column} is read as tokens/s"
    if named[2]:
        many = f"all {gpus:.0f} together give {gpus:.0f} times as much" if gpus else "how many there are is not said (--fact gpus=N)"
        note += f" of one GPU; {'there was one' if gpus == 1 else many}"
    return gpus, [note]


def _choose(columns: Mapping[str, str], present: set[str], source: str) -> dict[str, _Column]:
    """Which column is which, and what its values are multiplied by."""
    chosen = {
        ours: _Column(name, 1e-3 if name.endswith("_ms") else 1.0)
        for ours, names in _SYNONYMS.items()
        for name in reversed(names)
        if name in present
    }
    for ours, given in columns.items():
        if ours not in MAPPABLE:
            raise ConfigError(f"--map knows no {ours!r}{nearest(ours, MAPPABLE)}; it may name {', '.join(MAPPABLE)}")
        chosen[ours] = _named(ours, given, present, source)
    if "step" not in chosen:
        raise ConfigError(
            f"{source}: which column is the step? Say it with --map step=COLUMN; it has {', '.join(sorted(present)) or 'none'}"
        )
    return chosen


def _named(ours: str, given: str, present: set[str], source: str) -> _Column:
    """`COLUMN` or `COLUMN:UNIT` as --map gives it."""
    if given in present:
        return _Column(given, 1e-3 if given.endswith("_ms") and ours.endswith("_s") else 1.0)
    name, colon, unit = given.rpartition(":")
    if not colon or name not in present:
        name = name if colon else given
        raise ConfigError(f"{source} has no column {name!r}{nearest(name, present)}; it has {', '.join(sorted(present))}")
    units = _units(ours)
    if unit.lower() not in units:
        known = ", ".join(unit for unit in units if unit) or "none"
        raise ConfigError(f"--map {ours}={given}: {ours} knows no unit {unit!r}; it may have {known}")
    return _Column(name, units[unit.lower()], told=True)


def _units(ours: str) -> Mapping[str, float]:
    if ours in ("tokens", "tokens_per_s"):
        return COUNTS
    if ours == "memory_bytes":
        return BYTES
    if ours in ("mfu", "padding_share"):
        return SHARES
    return SECONDS if ours.endswith("_s") else {}


def _csv_rows(text: str, source: str) -> list[dict[str, Any]]:
    """Every line as a table; half a last line is left out where its missing cells show it."""
    reader = csv.DictReader(text.splitlines(), delimiter=_delimiter(_head(text)))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{source}, line {reader.line_num}: no CSV ({error})") from error
    if len(rows) > 1 and not text.endswith("\n") and None in rows[-1].values():
        rows.pop()
    return rows


def json_lines(text: str, source: str) -> list[dict[str, Any]]:
    """Every line as a table; half a last line (the trainer is still writing) is left out."""
    found = []
    lines = [(place, line) for place, line in enumerate(text.split("\n"), start=1) if line.strip()]
    for place, line in lines:
        try:
            found.append(json_table(line, f"{source}, line {place}"))
        except DataError:
            if len(lines) == 1 or place != lines[-1][0] or text.endswith("\n"):
                raise
    return found


def json_table(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: a table is needed, got {type(value).__name__}")
    return value
