"""Raw cells to rows of quantities in our units, and rows to runs: a log may hold several.

A file that was written on, a job that was started again, a counter that starts again each epoch: mixed together
their steps mean nothing, so rows are split where the step goes back, and one run is read.
"""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from redline.diagnose.data import table
from redline.diagnose.readers.cells import SECONDS, amount, duration_s, finite, number
from redline.diagnose.readers.columns import Column, assign, is_held_out, plain, synonyms, units_of
from redline.diagnose.readers.miner import Mined, seconds_of
from redline.errors import ConfigError, DataError, nearest

TIMES = {"step_s", "tokens_per_s", "samples_per_s", "updates_per_s", "mean_updates_per_s", "mean_step_s"}
TIMES |= {"elapsed_s", "at_s"}
LATE = 3
"""How many lines late a line may come."""
SIGNED = ("loss", "mfu", "grad_norm")


@dataclass
class Row:
    place: int
    step: int = -1
    """-1 where the line has none."""
    values: dict[str, float] = field(default_factory=dict)
    unsettled: set[str] = field(default_factory=set)
    """Quantities whose unit the log does not say."""
    lost: set[str] = field(default_factory=set)
    """Quantities shown as nan or inf."""
    null: bool = False
    """Whether its loss is JSON's null: nan, or not logged."""
    more: dict[str, float] = field(default_factory=dict)
    """All other numbers, under their names in plain words."""
    evaluated: bool = False
    """Whether it holds results of a validation."""
    total: float = 0.0
    fine_s: float = 0.0
    """Precision of its clock in seconds."""
    stamp_s: float | None = None
    bar: str = ""
    counter: str = ""
    """The label of its step."""
    pauses: dict[str, float] = field(default_factory=dict)
    """Validations and checkpoints since the update before, and how long they took; 0 if unknown."""
    after_s: float = 0.0
    """Time between this update and the start of the next, in a validation that has its own line."""

    @property
    def trained(self) -> bool:
        return "loss" in self.values or "loss" in self.lost


@dataclass
class Log:
    rows: list[Row]
    summary: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    """The column that each quantity is read from, as most lines have it."""
    unread: list[str] = field(default_factory=list)


def rows_of(mined: Sequence[Mined], given: Mapping[str, str], source: str) -> Log:
    labels = {label: "" for line in mined for label in line.cells} if given else {}
    named = _given(given, labels, source)
    known: dict[tuple[str, ...], _Shape] = {}
    log, used = Log([]), Counter[tuple[str, ...]]()
    for line in mined:
        key = (*line.cells, *line.units.values())
        if (shape := known.get(key)) is None:
            shape = known[key] = _shape(line, named)
        row = Row(line.place, bar=line.bar, stamp_s=seconds_of(line.stamp) if line.stamp else None)
        row.fine_s = 1.0 if line.stamp and not re.search(r"[.,]\d+$", line.stamp) else 0.0
        used[key] += _add(log, row, line.cells, shape, source)
    for key, _ in reversed(used.most_common()):
        log.columns |= known[key].columns
        log.unread = sorted([*known[key].held_out, *known[key].more])
    return log


def refuse_unknown(log: Log, source: str) -> None:
    """A table in which no column is known is an error that names them all."""
    if not {"step", "loss", *TIMES} & log.columns.keys():
        raise ConfigError(
            f"{source}: no column is known for a step, a loss or a time. Name them with --map step=COLUMN; it has"
            f" {_names(log.unread)}"
        )


@dataclass(frozen=True)
class _Shape:
    """What the labels of a kind of line mean."""

    columns: dict[str, Column]
    held_out: list[str]
    more: dict[str, str]
    """Other labels, with their names in plain words."""


def _shape(line: Mined, named: dict[str, Column]) -> _Shape:
    """What the user names takes precedence over what the labels seem to mean. A step that is not a whole number is a time:
    `[29/510] Batch 0.271`."""
    labels = {name: line.units.get(name, "") for name in line.cells}
    columns, times = assign(labels), dict[str, Column]()
    while "step" in columns and not (finite(line.cells[columns["step"].label]) or 0.0).is_integer():
        times.setdefault("step_s", Column(columns["step"].label, None))
        del labels[columns["step"].label]
        columns = assign(labels)
    given = {column.label for column in named.values()}
    meant = times | columns
    columns = {name: column for name, column in meant.items() if column.label not in given} | named
    taken = {column.label for column in columns.values()}
    others = [label for label in line.cells if label not in taken]
    held = [label for label in others if is_held_out(label)]
    return _Shape(columns, held, {label: plain(label)[0] for label in others if label not in held})


def _given(given: Mapping[str, str], labels: Mapping[str, str], source: str) -> dict[str, Column]:
    """What the user says with --map: `COLUMN` or `COLUMN:UNIT` for a quantity."""
    found = {}
    for quantity, text in given.items():
        if quantity not in (known := synonyms()):
            near = nearest(quantity, known)
            raise ConfigError(f"--map does not know {quantity!r}{near}; it takes {', '.join(known)}")
        name, unit = (text, plain(text)[1]) if text in labels else text.rpartition(":")[::2]
        if name not in labels:
            name = name or text
            near = nearest(name, labels)
            raise ConfigError(f"{source} has no column {name!r}{near}; it has {_names(labels)}")
        units = units_of(quantity)
        if unit and unit.lower() not in units:
            may = ", ".join(filter(None, units)) or "none"
            given_as = f"--map {quantity}={text}"
            raise ConfigError(f"{given_as}: {quantity} has no unit {unit!r}; it takes {may}")
        found[quantity] = Column(name, units.get(unit.lower(), 1.0), told=True)
    return found


def _names(labels: Iterable[str]) -> str:
    """Names of columns for a message, whatever they contain."""
    return ", ".join(name if name.isprintable() else repr(name) for name in sorted(labels))[:800] or "none"


def _add(log: Log, row: Row, cells: Mapping[str, Any], shape: _Shape, source: str) -> bool:
    """Fill a row from its cells and put it into the log; whether it is one of the run's."""
    if any(cells.get(f"train_{what}_per_second") is not None for what in ("samples", "steps")):
        closing = table("columns")["closing"]
        found = {ours: finite(str(cells.get(name)).partition("/")[0]) for name, ours in closing.items()}
        log.summary |= {name: value for name, value in found.items() if value is not None}
        return False
    for quantity, column in shape.columns.items():
        raw = cells.get(column.label)
        if raw is None or raw == "":
            row.null |= quantity == "loss" and raw is None and column.label in cells
        elif (value := _value(raw, quantity, column)) is not None:
            _put(row, quantity, value, raw, column, source)
    row.total = _total(cells, shape.columns)
    for kind in ("validation", "checkpoint"):
        if took_s := row.values.pop(f"{kind}_s", None):
            row.pauses[kind] = took_s
    row.evaluated = any(finite(cells.get(label)) is not None for label in shape.held_out)
    more = {name: finite(cells.get(label)) for label, name in shape.more.items()}
    row.more = {name: value for name, value in more.items() if value is not None}
    if row.evaluated and "loss" in row.values and TIMES & row.values.keys():
        row.pauses.setdefault("validation", 0.0)
    log.rows.append(row)
    return True


def _put(row: Row, quantity: str, value: float, raw: Any, column: Column, source: str) -> None:
    if not math.isfinite(value):
        row.lost.add(quantity)
    elif quantity == "step":
        row.step, row.counter = int(value), column.label
    elif value < 0 and quantity not in SIGNED and column.told:
        raise DataError(
            f"{source}: {column.label} is {value:g}, and {quantity} cannot be negative: name another column with"
            f" --map {quantity}=COLUMN"
        )
    elif value >= 0 or quantity == "loss":
        row.values[quantity] = value
        if column.factor is None and number(raw) is not None:
            row.unsettled.add(quantity)
        if quantity == "elapsed_s":
            decimals = len(str(raw).partition(".")[2]) if "e" not in str(raw).lower() else 0
            row.fine_s = (column.factor or 1.0) * 10.0**-decimals


def _value(raw: Any, quantity: str, column: Column) -> float | None:
    """A cell as a number, in our unit where the unit is known."""
    text = raw.strip().replace(",", "") if isinstance(raw, str) else raw
    if (value := number(text)) is not None:
        return value * (column.factor or 1.0)
    if not isinstance(raw, str):
        return None
    if quantity == "step":
        return number(text.partition("/")[0])
    units = units_of(quantity)
    if units is SECONDS and (seconds := duration_s(raw)) is not None:
        return seconds
    return amount(text, units)


def _total(cells: Mapping[str, Any], columns: Mapping[str, Column]) -> float:
    """The updates that were planned: the second number of `10/500`."""
    if (column := columns.get("step")) is None:
        return 0.0
    raw = cells.get(column.label)
    behind = raw.partition("/")[2] if isinstance(raw, str) else ""
    return finite(behind or cells.get(f"{column.label} total", cells.get("total_steps"))) or 0.0


def runs_of(rows: Sequence[Row]) -> tuple[list[list[Row]], bool]:
    """The rows of each run, one per step, and whether steps had to be counted on because they start again with every
    epoch.

    Lines of one step are joined: Lightning writes training and validation on separate ones, and ranks print the same.
    A line that goes back and contradicts what is there belongs to another run; one that is only late does not. Lines
    that count by another name than most (of an epoch, of a validation) add to the updates but are not updates.
    """
    counters = Counter(row.counter for row in rows if row.trained or TIMES & row.values.keys())
    counters = counters or Counter(row.counter for row in rows)
    main = counters.most_common(1)[0][0] if counters else ""
    runs: list[dict[int, Row]] = []
    offset, last, epoch = 0, -1, math.nan
    for row in (row for row in rows if row.counter == main):
        now = row.values.get("epoch", math.nan)
        if row.step + offset < last and now > epoch and int(now) > int(epoch):
            offset = last if row.bar else last + _apart(runs[-1]) - row.step
        row.step += offset
        if not runs or _of_another_run(row, runs[-1], last, _apart(runs[-1])):
            row.step, offset = row.step - offset, 0
            runs.append({row.step: row})
            last = row.step
        elif row.step in runs[-1]:
            _join(runs[-1][row.step], row)
        else:
            runs[-1][row.step] = row
            last = max(last, row.step)
        epoch = now if now == now else epoch
    if not offset:
        _join_others(runs, [row for row in rows if row.counter != main])
    return [[run[step] for step in sorted(run)] for run in runs], offset > 0


def _of_another_run(row: Row, run: Mapping[int, Row], last: int, apart: int) -> bool:
    """Whether the step went back, and not just because a line came late."""
    if row.step >= last:
        return False
    same = run.get(row.step)
    if same is None and row.step < next(iter(run)):
        return True
    other = same and any(same.values.get(name, value) != value for name, value in row.values.items())
    return last - row.step > LATE * apart or bool(other)


def _join(same: Row, row: Row) -> None:
    """Fill in what another line of a step holds. A line of a validation gives way to one of training."""
    first, second = (row, same) if same.evaluated and not row.evaluated else (same, row)
    clocks = [each.values.get("elapsed_s") for each in (same, row)]
    if row.evaluated and same.trained and (took_s := row.pauses.get("validation")):
        same.after_s += took_s
    elif row.evaluated and clocks[0] is not None and clocks[1] is not None:
        same.after_s += max(0.0, clocks[1] - clocks[0])
    elif row.evaluated or same.evaluated:
        same.pauses.setdefault("validation", 0.0)
    same.place = max(same.place, row.place) if first is row else same.place
    same.values, same.more = second.values | first.values, second.more | first.more
    same.unsettled = (same.unsettled | row.unsettled) & same.values.keys()
    same.lost, same.null = same.lost | row.lost, same.null and row.null
    same.total, same.evaluated = same.total or row.total, same.evaluated and row.evaluated


def _join_others(runs: Sequence[dict[int, Row]], others: Sequence[Row]) -> None:
    """Attach rows that count by another name to the update of their step, or as a pause before the next."""
    starts = [min(row.place for row in run.values()) for run in runs]
    for row in others if runs else ():
        at = max(0, bisect_right(starts, row.place) - 1)
        after = runs[at + 1] if at + 1 < len(runs) and row.place >= starts[at + 1] - LATE else {}
        # a validation may come before the first line of a run that goes on
        run = after if row.step in after else runs[at]
        if row.step in run:
            _join(run[row.step], row)
        elif row.step + 1 in run and row.evaluated:
            run[row.step + 1].pauses.setdefault("validation", 0.0)


def _apart(run: dict[int, Row]) -> int:
    """Updates between the last two lines of a run."""
    last = list(islice(reversed(run), 2))
    return max(1, last[0] - last[-1])
