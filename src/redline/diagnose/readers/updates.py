"""The rows of a run to updates: how long each took, and what of that was a validation or a checkpoint.

A time comes from the best source that the log has: a column of it; the batch over a rate; the clock; a running mean;
how the estimate of the time left falls; the closing summary. A note says which. Units that the log does not
state are settled by what else it says.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import linear_regression, median
from typing import Any

from redline.diagnose.observed import warm_up
from redline.diagnose.readers.rows import Log, Row
from redline.record.metrics import PHASES

SHOWS = 0.05
"""Share of an update from which on a pause inside it can be told from noise."""
FINE, FINER = 20, 50
"""A difference of two clock readings counts from this many times the clock's precision: 5%, and 2% in runs that
are long enough for INTERVALS of them."""
INTERVALS = 12
SLOWER = 1.5
"""An update that holds a validation, against one that does not."""
ROUNDED = 3
"""Differences of a sum that is printed to a few digits take this many values at most."""
RATES = ("tokens over tokens/s", "samples over samples/s", "updates/s")
CLOCK = 1.4
"""A rate that is this far from the clock is not that of an update."""
PAUSES = {"validation", "checkpoint"}
TIMERS = (*PHASES, "data_wait_s")
Times = list[float | None]


@dataclass
class Timed:
    rows: list[Row]
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    means: bool = False
    """Whether a time is the mean since the line before."""
    source: str = ""
    """What the times were taken from; empty for a column of them."""

    def typical(self, quantity: str) -> float | None:
        """Median of a quantity over the lines behind the warm-up."""
        values = [row.values[quantity] for row in self.rows if row.values.get(quantity)]
        return _middle(values[warm_up(len(values)) :])


def timed(
    rows: list[Row], log: Log, *, batch: float | None, tokens: float | None, share: float | None, means: bool
) -> Timed:
    """`batch` and `tokens` are those of an update, if the log's head gives them; `share` is how many GPUs they are
    spread over if the log's rates are those of one, None if that is not known."""
    run = Timed(rows, means=means)
    if len(rows) == 1 and rows[0].step == rows[0].total > 1:  # the closing line alone, of the whole run
        told, updates = rows[0].values, rows[0].step
        sums = {"step_s": told.pop("elapsed_s", None), "tokens": told.pop("tokens", told.get("tokens_total"))}
        told |= {name: value / updates for name, value in sums.items() if value}
    if not any({"elapsed_s", "step_s", "at_s"} & row.values.keys() for row in rows):
        epochs = [row for row in rows if row.counter and "epoch_s" in row.values]
        for row, ended_s in zip(epochs, accumulate(row.values["epoch_s"] for row in epochs), strict=True):
            row.values["elapsed_s"] = ended_s
    _settle_units(run, log)
    _drop_running_means(rows)
    _count_from_totals(rows)
    sources: dict[str, Callable[[], Times]] = {
        "": lambda: [row.values.get("step_s") for row in rows],
        "tokens over tokens/s": lambda: [_rate(row, "tokens", "tokens_per_s", tokens, share) for row in rows],
        "the clock": lambda: _clock(rows),
        "samples over samples/s": lambda: [_rate(row, "batch_size", "samples_per_s", batch) for row in rows],
        "updates/s": lambda: [_rate(row, "updates", "updates_per_s", 1.0) for row in rows],
        "the running mean": lambda: _from_means(rows),
        "the time that is left": lambda: _from_estimates(rows),
        "the closing summary": lambda: _from_summary(rows, log),
    }
    training = sum(row.trained for row in rows) or len(rows)
    clock_s = _middle(_clock(rows))
    for source, find in sources.items():
        found = [value if value and value > 0 else None for value in find()]
        if source in RATES and clock_s and not 1 / CLOCK < (_middle(found) or clock_s) / clock_s < CLOCK:
            continue  # a mean since the start, or over lines instead of updates
        if sum(value is not None for value in found) >= (min(3, max(1, 0.4 * training)) if not source else 1):
            for row, value in zip(rows, found, strict=True):
                row.values.pop("step_s", None)
                row.values |= {} if value is None else {"step_s": value}
            run.means, run.source = run.means or bool(source), source
            break
    _take_off_pauses(run)
    return run


def _rate(
    row: Row, amount: str, rate: str, known: float | None = None, share: float | None = 1.0
) -> float | None:
    """Time of an update from its size and the rate per second."""
    much, speed = row.values.get(amount, known), row.values.get(rate)
    return much / speed / share if much and speed and share else None


def _clock(rows: Sequence[Row]) -> Times:
    """Times from the differences of a clock, over as many updates as it takes to resolve them."""
    found: Times = []
    clocks = [now for row in rows if (now := _now(row)) is not None]
    reading_s = max((row.fine_s for row in rows), default=0.0)
    fine = FINE
    if reading_s and clocks:
        fine = round(min(FINER, max(FINE, (clocks[-1] - clocks[0]) / reading_s / INTERVALS)))
    stride = rows[1].step - rows[0].step if len(rows) > 1 else 1
    begins = bool(rows) and "elapsed_s" in rows[0].values and 0 < rows[0].step <= 2 * stride
    since: tuple[int, float] | None = (0, 0.0) if begins else None
    for place, row in enumerate(rows):
        now_s = _now(row)
        took_s = now_s - since[1] if since and now_s is not None else -1.0
        found.append(None)
        if now_s is None:
            continue
        if since and place and row.bar and now_s < (_now(rows[place - 1]) or 0.0):  # that of the next epoch
            since, took_s = (rows[place - 1].step, 0.0), now_s
        if since and took_s >= 0 and "restart" not in row.pauses:
            fine_s = 0.0 if "at_s" in row.values and "elapsed_s" not in row.values else row.fine_s
            last = place == len(rows) - 1 and not any(found)
            if row.step == since[0] or (took_s < fine * fine_s and not last):
                continue
            found[-1] = took_s / (row.step - since[0])
        since = (row.step, now_s + row.after_s)
    return found


def _now(row: Row) -> float | None:
    return row.values.get("elapsed_s", row.values.get("at_s", row.stamp_s))


def _from_means(rows: Sequence[Row]) -> Times:
    """The last running mean: it is that of the whole run so far."""
    rates = [_rate(row, "updates", "mean_updates_per_s", 1.0) for row in rows]
    means = [row.values.get("mean_step_s") or rate for row, rate in zip(rows, rates, strict=True)]
    last = next((value for value in reversed(means) if value), None)
    return [last if value else None for value in means]


def _from_estimates(rows: Sequence[Row]) -> Times:
    """How fast the estimate of the time that is left falls, over the longest stretch in which it does: it may be that of
    an epoch, and at the start it settles. Where the updates that are left are known, it is the mean of all so far times
    them, and that mean comes down to an update's time as the slow start weighs less."""
    stretches: list[list[tuple[int, float, float]]] = [[]]
    for row in rows:
        if "remaining_s" in row.values:
            if stretches[-1] and row.values["remaining_s"] > 1.5 * stretches[-1][-1][1] + 60:
                stretches.append([])
            stretches[-1].append((row.step, row.values["remaining_s"], row.total))
    known = max(stretches, key=len)
    known = known[len(known) // 10 :]
    if len(known) < 3 or known[-1][0] <= known[0][0]:
        return [None for _ in rows]
    steps, left, _ = zip(*known, strict=True)
    fell_s = -linear_regression(steps, left).slope
    cut_s = 30 if all(value % 60 == 0 for value in left) else 0  # whole minutes
    done = [(step % total, value + cut_s, total) for step, value, total in known if total]
    means = [(1 / step, left_s / (total - step)) for step, left_s, total in done if 0 < step < 0.8 * total]
    if len(means) >= 3:
        mean_s = linear_regression(*zip(*means, strict=True)).intercept
        fell_s = mean_s if 0 < mean_s < 1.25 * fell_s else fell_s
    return [fell_s if "remaining_s" in row.values else None for row in rows]


def _from_summary(rows: Sequence[Row], log: Log) -> Times:
    runtime_s, rate = log.summary.get("runtime_s", 0.0), log.summary.get("updates_per_s")
    updates = log.summary.get("updates") or rows[-1].total or runtime_s * (rate or 0.0)
    mean_s = runtime_s / updates if updates else 1 / rate if rate else 0.0
    paused_s = sum(row.after_s for row in rows) / updates if updates else 0.0
    return [max(mean_s - paused_s, 0.1 * mean_s) for _ in rows]


def _settle_units(run: Timed, log: Log) -> None:
    rows = run.rows
    _tell_times_from_clocks(rows)
    reference = _middle(_clock(rows)) or _middle([_rate(row, "tokens", "tokens_per_s") for row in rows])
    if (raw := _middle([row.values.get("step_s") for row in rows])) and reference:
        reference = _count_updates(run, raw, reference)
    if raw := _unsettled(rows, "step_s"):
        column = log.columns.get("step_s") or log.columns["elapsed_s"]
        name, factor = column.label, 1e-3 if raw >= 100 else 1.0
        if reference:
            ratio = raw / reference
            factor = min((1.0, 1e-3, 60.0), key=lambda unit: abs(math.log(ratio * unit)))
            if not 0.5 <= ratio * factor <= 2:
                run.notes.append(f"{name} is not read: it matches the clock in no unit")
                for row in rows:
                    row.values.pop("step_s", None)
        else:
            said = "milliseconds" if factor < 1 else "seconds"
            run.notes.append(f"{name} is read as {said} (--map step_s={name}:ms or :s overrides this)")
        _scale(rows, "step_s", factor)
    step_s = _middle([row.values.get("step_s") for row in rows]) or reference
    timers = [value for name in TIMERS if (value := _unsettled(rows, name))]
    for name in TIMERS if step_s and timers else ():  # timers are all in one unit
        _scale(rows, name, 1e-3 if max(timers) > 1.5 * (step_s or 0.0) else 1.0)
    if (raw := _unsettled(rows, "mfu")) and raw >= 2:
        _scale(rows, "mfu", 0.01)
        run.notes.append("mfu is in per cent")
    if raw := _unsettled(rows, "memory_bytes"):
        _scale(rows, "memory_bytes", 1.0 if raw > 1e7 else 2.0**20 if raw > 2000 else 2.0**30)


def _count_updates(run: Timed, step_s: float, clock_s: float) -> float:
    """Settle a time that is N times the clock's, where N divides all steps: if lines come less often, the counter counts
    samples; else the time covers all updates since the line before. Returns the time that the clock shows."""
    rows, times = run.rows, math.gcd(*(row.step for row in run.rows))
    if times < 2 or not 1 / CLOCK < step_s / clock_s / times < CLOCK:
        return clock_s
    if rows[-1].step - rows[-2].step == times:
        run.notes.append(f"the time on a line is that of {times} updates")
        for row in rows:
            row.values |= {"step_s": row.values["step_s"] / times} if "step_s" in row.values else {}
        return clock_s
    run.notes.append(f"the counter counts samples, {times} in an update")
    for row in rows:
        row.step, row.total = row.step // times, row.total // times
        row.values.setdefault("batch_size", float(times))
    return clock_s * times


def _tell_times_from_clocks(rows: Sequence[Row]) -> None:
    """A column called `time` that only grows is a clock, and a clock that does not is a time."""
    clocks = [row for row in rows if "elapsed_s" in row.values and not row.bar]
    backwards = sum(now.values["elapsed_s"] > after.values["elapsed_s"] for now, after in pairwise(clocks))
    if backwards > 0.2 * len(clocks) >= 1:
        for row in clocks:
            row.values["step_s"] = row.values.pop("elapsed_s")
            row.unsettled.add("step_s")
    timed = [row for row in rows if "step_s" in row.values]
    values = [row.values["step_s"] for row in timed]
    grows = all(before < after for before, after in pairwise(values))
    if len(values) >= 5 and grows and values[-1] > 3 * values[len(values) // 4]:
        for row in timed:
            row.values.setdefault("elapsed_s", row.values.pop("step_s"))
            row.unsettled.discard("step_s")


def _drop_running_means(rows: Sequence[Row]) -> None:
    """A rate that is all tokens so far over all time so far says nothing about an update."""
    names = ("tokens_total", "tokens_per_s", "elapsed_s")
    told = [[row.values[name] for name in names] for row in rows if row.values.keys() >= set(names)]
    if told and all(abs(rate * elapsed_s - total) <= 0.02 * total for total, rate, elapsed_s in told):
        for row in rows:
            row.values.pop("tokens_per_s", None)


def _count_from_totals(rows: Sequence[Row]) -> None:
    """Tokens or samples counted since the start become those of an update."""
    for total, each in (("tokens_total", "tokens"), ("samples_total", "batch_size"), ("tokens", "tokens")):
        known = [(row, row.values[total]) for row in rows if total in row.values]
        values = [value for _, value in known]
        if len(values) < 3 or any(new < old for old, new in pairwise(values)) or values[-1] == values[0]:
            continue
        steps = known[-1][0].step / max(1, known[0][0].step)
        if total == each and values[-1] < values[0] * max(2.5, steps / 4):
            continue  # rows of growing length, not a running sum
        pairs = [*pairwise(known), (known[0], known[-1])]
        found = [(new[1] - old[1]) / max(1, new[0].step - old[0].step) for old, new in pairs]
        mean, whole = found.pop(), values[-1] / max(1, known[-1][0].step)
        mean = whole if abs(whole / mean - 1) < SHOWS else mean  # from the start, so less is rounded off
        if len(set(found)) > 1 and len({f"{value:.4g}" for value in found}) <= ROUNDED:
            found = [mean] * len(found)
        for (row, _), value in zip(known[1:], found, strict=True):
            row.values[each] = value
        known[0][0].values.pop(each, None)


def _take_off_pauses(run: Timed) -> None:
    """Take validations and checkpoints out of the updates that hold them, and record them as events.

    What one took is what the log says, or the update's time above that of the updates around it; in the first update,
    which compiles too, it is the median of the rest.
    """
    behind = [row for row in run.rows if row.after_s]
    run.events = [{"event": "validation", "step": row.step, "took_s": row.after_s} for row in behind]
    rows = [row for row in run.rows if row.values.get("step_s")]
    _move_pauses(rows)
    paused = [at for at, row in enumerate(rows) if row.pauses.keys() & PAUSES]
    apart = [1, *(max(1, row.step - before.step) if run.means else 1 for before, row in pairwise(rows))]
    over_s = {at: (rows[at].values["step_s"] - _usual(rows, at)) * apart[at] for at in paused if at}
    told_s = [sum(rows[at].pauses.values()) for at in paused]
    usual_s = _middle([row.values["step_s"] for row in rows if not row.pauses]) or 0.0
    typical_s = median(over_s.values()) if over_s else 0.0
    least_s = 0.5 * median(told_s) if any(told_s) else SHOWS * usual_s * median(apart)
    inside = bool(over_s) and typical_s >= least_s
    for at in paused:
        row = rows[at]
        excess_s = over_s.get(at, min(typical_s, max(0.0, row.values["step_s"] - usual_s)))
        took = {kind: took for kind, took in row.pauses.items() if took}
        took = took or ({next(iter(row.pauses)): max(0.0, excess_s)} if inside else {})
        if inside:
            left_s = row.values["step_s"] - sum(took.values()) / apart[at]
            row.values["step_s"] = max(0.5 * min(usual_s, row.values["step_s"]), left_s)
        for kind in sorted(row.pauses.keys() & PAUSES):
            lasted = {"took_s": took[kind]} if kind in took else {}
            run.events.append({"event": kind, "step": row.step} | lasted)


def _move_pauses(rows: Sequence[Row]) -> None:
    """A logger may write the clock of a step when the next one begins, or the results of a validation with the step
    before it: where the updates that name one are as quick as all, and their neighbours are not, those held it."""
    named = [at for at, row in enumerate(rows) if row.pauses.keys() & PAUSES]
    inner = [at for at in named if 0 < at < len(rows) - 1]
    if len(inner) < 3 or any(took for at in named for took in rows[at].pauses.values()):
        return
    slow_s = SLOWER * median(row.values["step_s"] for row in rows)
    here, *beside = (median(rows[at + by].values["step_s"] for at in inner) for by in (0, -1, 1))
    shift = 0 if here > slow_s else -1 if beside[0] > slow_s else 1 if beside[1] > slow_s else 0
    for at in named if shift < 0 else reversed(named) if shift else ():
        if 0 <= at + shift < len(rows):
            rows[at + shift].pauses, rows[at].pauses = rows[at].pauses, {}


def _usual(rows: Sequence[Row], at: int) -> float:
    """The time of the updates around one that paused: speeds change in the course of a run."""
    near = [row.values["step_s"] for row in rows[max(1, at - 20) : at + 20] if not row.pauses]
    return median(near) if near else rows[at].values["step_s"]


def _unsettled(rows: Sequence[Row], quantity: str) -> float | None:
    return _middle([row.values.get(quantity) for row in rows if quantity in row.unsettled])


def _scale(rows: Sequence[Row], quantity: str, factor: float) -> None:
    for row in rows:
        if quantity in row.unsettled and quantity in row.values:
            row.values[quantity] *= factor
            row.unsettled.discard(quantity)


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return median(known) if known else None
