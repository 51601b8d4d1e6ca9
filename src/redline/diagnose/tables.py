"""Logs that are tables: Lightning's metrics.csv, and any CSV or JSONL with a mapping.

`--map step=iteration,step_s=dt:ms` names the columns, with the unit behind a colon; a column whose name ends
in `_ms` is read as milliseconds without one, and said so.
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
from redline.diagnose.segments import longest, told
from redline.errors import ConfigError, DataError, nearest

MAPPABLE = (
    *(field.name for field in fields(Step) if field.name not in ("parts_s", "not_a_number", "bad_norm")),
    "tokens_per_s",
)
_SEPARATORS = ("/", "|")
"""Of the names that Lightning's ThroughputMonitor writes: the first is its default."""
_SYNONYMS = {
    "step": ("step", "global_step", "iter", "iteration", "trainer/global_step"),
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "train_loss_step"),
    "step_s": (
        "step_s",
        "step_time",
        "step_time_s",
        "time_per_step",
        "iter_time",
        "dt_ms",
        "step_ms",
        "step_time_ms",
        "iter_ms",
    ),
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
_EPOCHS = (
    "epoch",
    "epochs",
    "epochnum",
    "epoch_num",
    "epoch_number",
    "epoch_idx",
    "current_epoch",
    "train/epoch",
    "trainer/epoch",
)
_COMMA = re.compile(r"[-+]?\d+(?:\.\d{3})*,\d+(?:[eE][-+]?\d+)?")
"""A number that a spreadsheet wrote where a comma is the decimal point."""
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_POINT = re.compile(r"[-+]?(?!0*[1-9]\d{0,2}(?:\.\d{3})+$)\d*\.\d+(?:[eE][-+]?\d+)?")
"""A decimal point that cannot part thousands."""
_MOST_MFU = 2.0
"""A column of shares never holds as much, not even a wrong one; a column in per cent holds more than that."""


@dataclass
class _Row:
    """What the lines of a step hold, in our units."""

    step: int
    values: dict[str, float]
    wrong: bool
    """Whether its loss was written as nan or inf."""
    null: bool
    """Whether it was written as JSON's null: nan, or not logged."""
    epoch: float | None


@dataclass(frozen=True)
class _Column:
    name: str
    factor: float = 1.0
    told: bool = False
    """Whether its unit was given."""


def is_lightning(text: str) -> bool:
    cells = _cells(text, 0)
    return "step" in cells and "epoch" in cells


def is_csv(text: str) -> bool:
    head = _cells(text, 0)
    return (
        len(head) > 1
        and not text.lstrip().startswith(("{", "#", "|", "-"))
        and len(head) == len(_cells(text, 1))
    )


def is_jsonl(text: str) -> bool:
    return text.lstrip().startswith("{") and '"log_history"' not in text


def _head(text: str) -> str:
    return text.partition("\n")[0]


def _cells(text: str, line: int) -> list[str]:
    """The cells of the first line or the second; a comma inside quotes parts none."""
    lines = text.split("\n", 2)
    return (
        next(csv.reader([lines[line].strip()], delimiter=_delimiter(lines[0])), [])
        if line < len(lines)
        else []
    )


def _delimiter(head: str) -> str:
    """What a spreadsheet put between the cells: where a comma is the decimal point it is a semicolon."""
    return max(",;\t", key=head.count)


def read_table(text: str, source: str, columns: Mapping[str, str], name: str) -> Observed:
    """A CSV (`name` csv or lightning) or JSONL file; `columns` maps our names to its own."""
    rows: Sequence[Mapping[str, Any]] = (
        json_lines(text, source) if name == "jsonl" else _csv_rows(text, source)
    )
    # csv's name for the cells beyond the last column
    present = {key for row in rows for key in row if key is not None}
    chosen = _choose(columns, present, source)
    runs, counted_on = _runs(_rows(rows, chosen, source))
    run = sorted(longest([list(each.values()) for each in runs]), key=lambda row: row.step)
    lost = _lost(run)
    repairs = [
        f"{c.name} is read as milliseconds" for c in chosen.values() if c.name.endswith("_ms") and not c.told
    ]
    gpus, note = _one_gpu(rows, chosen)
    repairs += [*note, *(told(len(runs), run[0].step, run[-1].step) if run else ())]
    repairs += (
        [f"the step starts again with each epoch: counted on to {run[-1].step:,}"]
        if counted_on and run
        else []
    )
    steps, before = [], None
    for row in run:
        step, values = row.step, row.values
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


def _rows(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, _Column], source: str) -> list[_Row]:
    """The lines that hold something of ours. Lightning's validation counts its batches under numbers of their
    own, which hold nothing."""
    found = []
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
                    f"{source}: {chosen[ours].name} is {value:g} at step {step:.0f}, and {ours} cannot be"
                    f" negative: name another column with --map {ours}=COLUMN"
                )
        wrong, null = _no_number(row, chosen["loss"].name) if "loss" in chosen else (False, False)
        if values or wrong or null:
            epoch = next((value for name in _EPOCHS if (value := finite(row.get(name))) is not None), None)
            found.append(_Row(int(step), values, wrong, null, epoch))
    return found


def _runs(rows: Sequence[_Row]) -> tuple[list[dict[int, _Row]], bool]:
    """The steps of each run, and whether they had to be counted on because they start again with every epoch.

    Lines of one step are joined where they do not contradict each other: Lightning writes training and
    validation on separate ones. A line that contradicts the one before it is the same update of another
    process; one that contradicts an earlier one is of another run.
    """
    runs: list[dict[int, _Row]] = []
    offset, counted_on, last = 0, False, None
    for row in rows:
        if (
            last
            and row.step + offset < last.step
            and row.epoch is not None
            and last.epoch is not None
            and row.epoch > last.epoch
        ):
            offset, counted_on = last.step + _apart(runs[-1]) - row.step, True
        row.step += offset
        if last is None or _of_another_run(row, runs[-1], last):
            row.step, offset = row.step - offset, 0
            runs.append({row.step: row})
            last = row
        elif (same := runs[-1].get(row.step)) is None:
            runs[-1][row.step] = row
            last = row if row.step > last.step else last
        elif not _contradicts(row, same):
            same.values.update(row.values)
            same.wrong, same.null = same.wrong or row.wrong, same.null or row.null
    return runs, counted_on


def _of_another_run(row: _Row, run: Mapping[int, _Row], last: _Row) -> bool:
    """Whether the step went back, and not for a line that only comes late."""
    if row.step >= last.step:
        return False
    same = run.get(row.step)
    return _contradicts(row, same) if same else row.step < next(iter(run))


def _contradicts(one: _Row, other: _Row) -> bool:
    return any(other.values.get(name, value) != value for name, value in one.values.items())


def _apart(run: Mapping[int, _Row]) -> int:
    """Updates between the last two lines of a run."""
    last = list(run)[-2:]
    return max(1, last[-1] - last[0])


def _lost(run: Sequence[_Row]) -> set[int]:
    """The steps whose loss is no number: nan or inf, and nulls at the end, more of them than ever stood
    between two losses."""
    nulls: list[int] = []
    most = 0
    for row in run:
        if "loss" in row.values:
            most, nulls = max(most, len(nulls)), []
        elif row.null:
            nulls.append(row.step)
    return {row.step for row in run if row.wrong and "loss" not in row.values} | set(
        nulls if len(nulls) > most else ()
    )


def _no_number(row: Mapping[str, Any], name: str) -> tuple[bool, bool]:
    """Whether a loss was written that is none, nan or inf, and whether as JSON's null; not on a line of a
    validation, which has no loss."""
    raw = row.get(name, "")
    if raw is None and isinstance(row, dict) and name in row:
        return False, not any(
            value is not None for key, value in row.items() if re.search(r"val|eval", str(key))
        )
    value = number(raw)
    return value is not None and not math.isfinite(value), False


def _step(step: int, values: dict[str, float], before: tuple[int, float] | None, *, lost: bool) -> Step:
    speed = values.pop("tokens_per_s", None)
    if (
        "step_s" not in values
        and "elapsed_s" in values
        and before is not None
        and values["elapsed_s"] > before[1]
    ):
        values["step_s"] = (values["elapsed_s"] - before[1]) / max(1, step - before[0])
    if speed and "tokens" not in values and "step_s" in values:
        values["tokens"] = speed * values["step_s"]
    elif speed and "step_s" not in values:
        values |= {"step_s": values.get("tokens", speed) / speed, "tokens": values.get("tokens", speed)}
    if values.get("mfu", 0.0) < 0:
        values.pop("mfu")
    return Step(step=step, not_a_number=lost, **values)  # type: ignore[arg-type]


def _one_gpu(
    rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, _Column]
) -> tuple[float | None, list[str]]:
    """How many GPUs Lightning's speed is of, and what is to be said of it. It writes the names without
    `device` only where there are several; what it calls items is what its `length_fn` counts."""
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
        many = (
            f"all {gpus:.0f} together give {gpus:.0f} times as much"
            if gpus
            else "how many there are is not said (--fact gpus=N)"
        )
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
            raise ConfigError(
                f"--map knows no {ours!r}{nearest(ours, MAPPABLE)}; it may name {', '.join(MAPPABLE)}"
            )
        chosen[ours] = _named(ours, given, present, source)
    if "step" not in chosen:
        raise ConfigError(
            f"{source}: which column is the step? Say it with --map step=COLUMN; it has"
            f" {', '.join(sorted(present)) or 'none'}"
        )
    return chosen


def _named(ours: str, given: str, present: set[str], source: str) -> _Column:
    """`COLUMN` or `COLUMN:UNIT` as --map gives it."""
    if given in present:
        return _Column(given, 1e-3 if given.endswith("_ms") and ours.endswith("_s") else 1.0)
    name, colon, unit = given.rpartition(":")
    if not colon or name not in present:
        name = name if colon else given
        raise ConfigError(
            f"{source} has no column {name!r}{nearest(name, present)}; it has {', '.join(sorted(present))}"
        )
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
    return _plain_numbers(rows)


def _plain_numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Numbers as Python writes them. Commas are decimal points where some part no thousands, or nothing has a
    point; else they part thousands."""
    cells = [cell for row in rows for cell in row.values() if isinstance(cell, str)]
    commas = [cell for cell in cells if _COMMA.fullmatch(cell) or _THOUSANDS.fullmatch(cell)]
    if not commas:
        return rows
    decimal = any(not _THOUSANDS.fullmatch(cell) for cell in commas) and not any(
        _POINT.fullmatch(cell) for cell in cells
    )
    return [{name: _plain(cell, decimal) for name, cell in row.items()} for row in rows]


def _plain(cell: Any, decimal: bool) -> Any:
    if not isinstance(cell, str):
        return cell
    if decimal:
        european = _COMMA.fullmatch(cell) or re.fullmatch(r"[-+]?[1-9]\d{0,2}(?:\.\d{3})+", cell)
        return cell.replace(".", "").replace(",", ".") if european else cell
    return cell.replace(",", "") if _THOUSANDS.fullmatch(cell) else cell


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
