"""A log of another trainer -> Observed: text to rows, rows to a run, a run to updates and facts."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mode
from typing import Any

from redline.diagnose.data import patterns, table
from redline.diagnose.observed import MEASURED, Facts, Observed, Step
from redline.diagnose.readers import physics
from redline.diagnose.readers.cells import finite
from redline.diagnose.readers.files import HEAD, Source, source_of
from redline.diagnose.readers.miner import LINE, seconds_of
from redline.diagnose.readers.rows import TIMES, Log, Row, refuse_unknown, rows_of, runs_of
from redline.diagnose.readers.updates import TIMERS, Timed, timed
from redline.diagnose.trainers import Trainer, facts_of, recognise

FOLLOWS = {*TIMERS, "step_s", "loss", "mfu", "tflops", "memory_bytes", "tokens", "tokens_total"}
FOLLOWS |= {"tokens_per_s", "samples_per_s", "updates_per_s"}
"""What may stand on a separate line after that of its update."""


def read_log(path: Path, columns: Mapping[str, str], given: Mapping[str, Any]) -> Observed | None:
    """The log at a path; None if the file holds no training. `given`: facts from the user."""
    source, name = source_of(path), str(path)
    trainer = recognise(source.marks)
    listed = source.rows[0].cells.keys() if source.format == "csv" and source.rows else ()
    if "Name" in listed and len(set(listed) & {*table("columns")["project"]}) >= 3:
        return _of_runs([row.cells for row in source.rows], name, trainer)
    named = trainer.entry.get("columns", {})  # as "LABEL:UNIT", in small letters
    spelt = {label.lower(): label for row in source.rows for label in row.cells} if named else {}
    own = {ours: text.rpartition(":")[::2] for ours, text in named.items()}
    own = {ours: f"{spelt[label]}:{unit}" for ours, (label, unit) in own.items() if label in spelt}
    log = rows_of(source.rows, own | dict(columns), name)
    rows = _of_a_console(log, source) if source.lines else _of_a_table(log, source, name)
    if not rows:
        return _failed(source, trainer, given, name)
    run = _longest(rows, source.notes)
    facts = _facts_around(run, source, trainer) if source.lines else facts_of(trainer, source.text)
    return _observed(run, log, trainer, facts | dict(given), source, name)


def _failed(source: Source, trainer: Trainer, given: Mapping[str, Any], name: str) -> Observed | None:
    """A run that ended before its first update; None where it was none."""
    text, said = source.text, patterns("trouble")
    if not said["failed"].search(text) or not (trainer.name or said["trains"].search(text)):
        return None
    known = facts_of(trainer, text[:HEAD]) | dict(given)
    facts = physics.solve(known, Timed([]), trainer, one_gpu=bool(trainer.entry.get("one_gpu")), summary={})
    return Observed(source=name, format=source.format, trainer=trainer, text=text, facts=facts)


def _of_a_table(log: Log, source: Source, name: str) -> list[Row]:
    refuse_unknown(log, name)
    rows = [row for row in log.rows if row.step >= 0]
    if not rows:
        rows = _counted(log.rows, source.notes)
    elif source.format == "tensorboard" and 2 * len({row.step for row in rows}) < len(rows):
        source.notes.append("the step is an epoch here: the values of an epoch are counted one by one")
        for row, number in zip(rows, accumulate(row.trained for row in rows), strict=True):
            row.step = max(1, number)
    return rows if any(row.values or row.lost for row in rows) else []


def _of_runs(runs: Sequence[Mapping[str, Any]], source: str, trainer: Trainer) -> Observed:
    """A table with one line per run: what most of them share."""
    cells = {name: [v for row in runs if (v := finite(row.get(name)))] for name in runs[0]}
    found = {ours: cells.get(name, []) for name, ours in table("columns")["of_a_run"].items()}
    counts = [v for name in ("_step", "iter", "step") for v in cells.get(name, [])]
    note = f"each of the {len(runs)} lines is a whole run, not an update: give the history of one run"
    facts = Facts(**{name: mode(values) for name, values in found.items() if values})  # type: ignore[arg-type]
    updates = int(mode(counts)) if counts else 0
    about: dict[str, Any] = {"source": source, "format": "runs", "trainer": trainer}
    return Observed(**about, facts=facts, updates=updates, notes=(note,))


def _of_a_console(log: Log, source: Source) -> list[Row]:
    """The training lines: those with a step, else the next best that show one; none if no line does."""
    plain = [row for row in log.rows if not row.bar]
    rows = [row for row in plain if row.step >= 0]
    _attach(rows, plain)
    if rows and all(row.counter == "fraction" and row.step == row.total for row in rows):
        for number, row in enumerate(rows, start=1):
            row.step *= number  # 100/100 [=====]: one line per epoch, always at its last step
    if len({row.step for row in rows}) == 1 and all(row.counter == "fraction" for row in rows):
        for row in rows:
            row.step, row.total = int(row.total), 0.0  # 0/50, SamplesPerSec=13.2: the epoch, and the step
    if not _trains(rows) or not any(TIMES & row.values.keys() or row.stamp_s is not None for row in rows):
        bar = _bar(log, rows)
        rows = bar if bar and (_trains(bar) or not _trains(rows)) else rows
    if not _trains(rows):
        rows = _placed([row for row in plain if row.step < 0 and "epoch" in row.values], log, source.text)
    if not _trains(rows):
        rows = _by_checkpoints(source.lines)
    if not _trains(rows) and not patterns("page")["table"].search(source.text):
        lost = [row for row in plain if row.step < 0 and not row.evaluated]
        rows = _counted([row for row in lost if {"loss", "updates_per_s"} & row.values.keys()], source.notes)
    if not _trains(rows) and log.summary.get("runtime_s") and log.summary.get("updates_per_s"):
        runtime_s = log.summary["runtime_s"]
        updates = log.summary.setdefault("updates", round(runtime_s * log.summary["updates_per_s"]))
        rows = [Row(0, 0), Row(len(source.lines), int(updates), {"elapsed_s": runtime_s})]
    return rows if _trains(rows) else []


def _longest(rows: Sequence[Row], notes: list[str]) -> list[Row]:
    runs, counted_on = runs_of(rows)
    told = [sum(row.trained or "step_s" in row.values for row in each) for each in runs]
    run = max(zip(told, map(len, runs), range(len(runs)), runs, strict=True))[-1]
    if len(runs) > 1:
        steps = f"steps {run[0].step:,} to {run[-1].step:,}"
        notes.append(f"{len(runs)} runs in this log; reading the longest, {steps}")
    if counted_on:
        notes.append(f"the step restarts with each epoch: counted on to {run[-1].step:,}")
    return run


def _facts_around(run: Sequence[Row], source: Source, trainer: Trainer) -> dict[str, Any]:
    """The facts before a run, at its beginning and at the end of the log."""
    start, lines = run[0].place, source.lines
    head = "\n".join(lines[:start])[-HEAD:], "\n".join(lines[start : start + 200]), "\n".join(lines[-200:])
    facts = facts_of(trainer, "\n".join(head))
    named = re.findall(r"(?i)\brank[ _]?(\d{1,4})\b", source.text[: 10 * HEAD])
    ranks = {int(rank) for rank in named}
    if len(ranks) > 1 and len(ranks) == max(ranks) + 1:
        facts.setdefault("gpus", float(len(ranks)))
    return facts


def _trains(rows: Sequence[Row]) -> bool:
    """Whether rows are from training: a step that grows, with a loss or a time."""
    shown = TIMES | {"grad_norm", "tflops"}
    told = any(row.trained or shown & row.values.keys() for row in rows)
    return told and len({row.step for row in rows}) > 1


def _placed(rows: list[Row], log: Log, text: str) -> list[Row]:
    """Lines of Hugging Face's Trainer without its bar: they give their epoch, and its head or its closing line gives the
    number of steps and of epochs."""
    names = ("Total optimization steps", "Num Epochs")
    told = [re.search(rf"{name} = ([\d,]{{1,12}})\b", text) for name in names]
    steps, epochs = (float(found[1].replace(",", "")) if found else 0.0 for found in told)
    if not steps or not epochs:
        steps = log.summary.get("runtime_s", 0.0) * log.summary.get("updates_per_s", 0.0)
        epochs = log.summary.get("epoch", 0.0)
    for row in rows if steps and epochs else ():
        row.step, row.total = round(row.values["epoch"] / epochs * steps), steps
    return rows


def _by_checkpoints(lines: Sequence[str]) -> list[Row]:
    """If no line shows an update: when each checkpoint was written."""
    found: dict[int, tuple[int, float]] = {}
    for place, line in enumerate(lines):
        named = re.search(r"checkpoint-(\d{1,9})\b", line) or re.search(r"Running (training)", line)
        stamp = LINE["stamp"].search(line) if named else None
        if named and stamp and (at_s := seconds_of(stamp[0])) is not None:
            found.setdefault(int(named[1]) if named[1].isdigit() else 0, (place, at_s))
    since_s = min((at_s for _, at_s in found.values()), default=0.0)
    return [Row(place, step, {"elapsed_s": at_s - since_s}) for step, (place, at_s) in sorted(found.items())]


def _counted(rows: list[Row], notes: list[str]) -> list[Row]:
    """Lines without a step: each counts as one."""
    if len(rows) >= 3:
        for number, row in enumerate(rows, start=1):
            row.step = number
            row.stamp_s = None if "updates_per_s" in row.values else row.stamp_s  # the clock is that of lines
        notes.append("the lines show no step: each counts as one update")
    return rows


def _bar(log: Log, lines: Sequence[Row]) -> list[Row]:
    """The progress bar of the training, with what `lines` say about its steps and the losses that the Trainer prints beside
    it: those come with an epoch, often far from their step, and the epoch says which step it is."""
    bars: dict[str, list[Row]] = {}
    for row in log.rows:
        if row.bar and row.total > 2 and not LINE["not_training"].search(row.bar):
            bars.setdefault(row.bar, []).append(row)
    bar = max(bars.values(), key=lambda rows: rows[-1].values.get("elapsed_s", 0.0), default=[])
    if len(bar) > 1 and all(row.step == row.total and "epoch" in row.values for row in bar):
        clock = accumulate(row.values.get("elapsed_s", 0.0) for row in bar)  # each epoch shows its end alone
        for number, (row, elapsed_s) in enumerate(zip(bar, clock, strict=True), start=1):
            row.step, row.values["elapsed_s"] = row.step * number, elapsed_s
    others = [row for row in log.rows if not row.bar and (row.step >= 0 or "epoch" in row.values)]
    last, end = log.summary.get("epoch"), bar[-1].total if bar else 0.0
    if not last:
        last = max((row.values.get("epoch", 0.0) for row in others), default=0.0)
        end = bar[-1].step if bar else 0.0
    by_step = {row.step: row for row in bar}
    shown, steps = sorted(by_step), sorted({row.step for row in lines})
    if _trains(lines) and abs(max(by_step, default=0) - steps[-1]) > 2 * (steps[-1] - steps[-2]):
        return []  # lines of other steps than the bar's
    for row in others if bar else ():
        place = row.step if row.step >= 0 else row.values["epoch"] / last * end if last else 0.0
        behind = bisect_left(shown, place)
        beside = shown[max(0, behind - 1) : behind + 1]
        at = by_step[min(beside, key=lambda step: abs(step - place))]
        at.after_s += row.pauses.get("validation", 0.0) if row.evaluated else 0.0
        names = ("loss", "grad_norm", "tokens_total", "tokens")
        at.values = {name: row.values[name] for name in names if name in row.values} | at.values
        at.more, at.lost = at.more | row.more, at.lost | row.lost
    return bar


def _attach(rows: Sequence[Row], others: Sequence[Row]) -> None:
    """Attach lines without a step (timers, the numbers of a block) to the update before them."""
    places = [row.place for row in rows]
    for row in others:
        if row.step < 0 and (at := bisect_right(places, row.place) - 1) >= 0:
            new = FOLLOWS & row.values.keys() - rows[at].values.keys()
            rows[at].values |= {name: row.values[name] for name in new}
            rows[at].unsettled |= new & row.unsettled
            rows[at].more = row.more | rows[at].more


def _mark_pauses(run: Sequence[Row], pauses: Sequence[tuple[int, str]]) -> None:
    """Mark updates that follow a line about a validation or a checkpoint, unless the rows show those."""
    places = [row.place for row in run]
    told = any(took for row in run for took in row.pauses.values())
    for place, kind in pauses if not told else ():
        if (at := bisect_left(places, place)) < len(run) and place > (places[at - 1] if at else -1):
            run[at].pauses.setdefault(kind, 0.0)


def _observed(
    run: list[Row], log: Log, trainer: Trainer, facts: dict[str, Any], source: Source, name: str
) -> Observed:
    notes = source.notes
    _mark_pauses(run, source.pauses)
    rate, batch = log.columns.get("tokens_per_s"), facts.get("batch_size")
    one_gpu = bool(trainer.entry.get("one_gpu")) or bool(rate and rate.one_gpu)
    tokens = facts.get("tokens") or (batch * facts["seq_len"] if batch and facts.get("seq_len") else None)
    share = facts.get("gpus") if one_gpu else 1.0
    found = timed(run, log, batch=batch, tokens=tokens, share=share, means=bool(trainer.entry.get("means")))
    known = physics.solve(facts, found, trainer, one_gpu=one_gpu, summary=log.summary)
    notes += found.notes
    if found.source:
        notes.append(f"the time of an update is taken from {found.source}")
    if log.unread and not source.lines and not any("step_s" in row.values for row in run):
        notes.append(f"columns not used: {', '.join(log.unread[:20])}")
    lost = _lost(run)
    return Observed(
        source=name,
        format=source.format,
        trainer=trainer,
        steps=tuple(_step(row, lost) for row in run),
        updates=_updates(run, log),
        planned=int(next((row.total for row in reversed(run) if row.total), 0)) or None,
        facts=known,
        text=source.text,
        notes=tuple(notes),
        events=tuple(found.events),
        lines_are_means=found.means,
        printed_tokens_per_s=_contradicted(found, known),
    )


def _step(row: Row, lost: set[int]) -> Step:
    values = {name: row.values[name] for name in MEASURED if row.values.get(name) is not None}
    values["tokens"] = values.get("tokens") or None  # type: ignore[assignment]
    gone = row.step in lost
    return Step(step=row.step, not_a_number=gone, bad_norm="grad_norm" in row.lost, more=row.more, **values)  # type: ignore[arg-type]


def _lost(run: Sequence[Row]) -> set[int]:
    """The steps whose loss is not a number: nan or inf, and nulls at the end: at least three, and more than ever came between
    two losses (a closing summary has none)."""
    nulls: list[int] = []
    most = 2
    for row in run:
        if "loss" in row.values:
            most, nulls = max(most, len(nulls)), []
        elif row.null and not row.evaluated:
            nulls.append(row.step)
    bad = {row.step for row in run if "loss" in row.lost and "loss" not in row.values}
    return bad | set(nulls if len(nulls) > most else ())


def _contradicted(run: Timed, facts: Facts) -> float | None:
    """tokens/s as printed, if neither all GPUs nor one of them can produce it."""
    rate, step_s, tokens = (run.typical(name) for name in ("tokens_per_s", "step_s", "tokens"))
    if not rate or not step_s or not tokens or run.source.startswith("tokens"):
        return None
    rates = [row.values["tokens_per_s"] for row in run.rows if "tokens_per_s" in row.values]
    if all(before < after for before, after in pairwise(rates)):
        return None  # includes a slow start
    ratio = physics.whole(tokens / (rate * step_s))
    return rate if ratio and ratio > 1 and ratio != facts.gpus else None


def _updates(run: Sequence[Row], log: Log) -> int:
    """The last step's number if the log starts at the beginning, else the number of updates it shows."""
    end, trained = run[-1].step, [row for row in run if row.trained] or run
    if run[0].bar or (len(run) == 1 and end == run[0].total):
        return end
    first, last = trained[0].step, trained[-1].step
    stride = max(1, trained[1].step - first) if len(trained) > 1 else 1
    # the summary of an epoch may count on from the last line
    end = max([end, *(row.step for row in log.rows if not row.bar and end < row.step < end + stride)])
    last = max(last, int(log.summary.get("updates", 0)))
    if first > 2 * stride:
        return last - first + stride
    from_zero = first == 0 if stride == 1 else first % stride == stride - 1
    return max(end, last + from_zero)
