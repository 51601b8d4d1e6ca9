"""A run's figures as a page shows them: bars with their lengths, parts of a stack, rows of tables. No torch,
no HTML.

    view(run).time_stack[0].percent

`place` is the run's place among those shown and decides its colour. Numbers become text here, once, for the
page and for the terminal.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.record.read import Run, number, table
from redline.record.units import (
    DASH,
    exact,
    factor,
    format_bytes,
    format_count,
    format_duration,
    format_limit_share,
)
from redline.record.words import BAD, told
from redline.report.ablation import Ablation, Trials, ablation, trials, tuning
from redline.report.compare import ratio
from redline.report.figures import Quality, Summary, summarise
from redline.report.findings import FindingView, findings

TESTED = {"base": "before", "answers": "after fine-tuning on the answers", "samples": "after RFT"}
FIRST_EVENTS, LAST_EVENTS = 20, 80
_KINDS = {
    "updates": "p0", "forward": "p0", "backward": "p4", "optimiser update": "p2", "between phases": "p6",
    "data wait": "p7",
    "first updates": "p3", "checkpoints": "p5", "validation": "p1", "other": "p6", "generation": "p8",
    "sampling": "p8", "tests": "p1", "fine-tuning on answers": "p3",
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    name: str
    text: str
    percent: float
    kind: str
    note: str = ""


@dataclass(frozen=True)
class PlanRow:
    name: str
    value: str
    source: str
    reason: str


@dataclass(frozen=True)
class EventRow:
    at: str
    text: str
    kind: str


@dataclass(frozen=True)
class Test:
    name: str
    n: int
    split: str
    accuracy: float
    low: float
    high: float
    answer_rate: float


@dataclass(frozen=True, kw_only=True)
class RunView:
    run: Run
    place: int
    summary: Summary
    speed_bars: list[Bar]
    floor_s: float | None
    """Time of an update by roofline."""
    time_stack: list[Bar]
    memory_bars: list[Bar]
    memory_stack: list[Bar]
    findings: list[FindingView] | None
    remark: str
    """What is said beside them, or where there are none."""
    plan: list[PlanRow]
    events: list[EventRow]
    ablation: list[Ablation]
    trials: Trials
    tests: list[Test]
    samples: dict[str, Any] | None
    recipe_text: str


def view(run: Run, place: int = 0) -> RunView:
    """Everything that is shown of a run. Costs some 20 µs an update: made once, and handed to the page and to
    the terminal."""
    summary = summarise(run)
    memory = summary.memory
    speed = summary.speed
    found, remark = findings(run, speed, summary.quality)
    return RunView(
        run=run,
        place=place,
        summary=summary,
        speed_bars=_speed_bars(summary),
        floor_s=speed.step_s * speed.attained_share if speed.step_s and speed.attained_share else None,
        time_stack=_stack([(p.name, p.elapsed_s, format_duration(p.elapsed_s), p.note) for p in summary.time]),
        memory_bars=_bars([
            ("peak seen", memory.seen_bytes, format_bytes(memory.seen_bytes), "seen", ""),
            ("predicted", memory.predicted_bytes, format_bytes(memory.predicted_bytes), "limit", _of_device(memory.device_bytes)),
        ]),
        memory_stack=_stack([(name, size, format_bytes(size), "") for name, size in memory.predicted_parts_bytes.items()]),
        findings=found,
        remark=remark,
        plan=plan_rows(run),
        events=event_rows(run),
        ablation=ablation(run.ablation),
        trials=trials(tuning(run.tuning) or run.trials),
        tests=accuracies(run.evaluations),
        samples=samples_of(run.path),
        recipe_text=run.recipe_text,
    )  # fmt: skip


def samples_of(path: Path) -> dict[str, Any] | None:
    """What `redline rft stats --json` says of an RFT run; None before anybody has begun to sample."""
    if not (path / "samples.db").is_file():
        return None
    from redline.rft.stats import stats
    from redline.rft.store import Store

    with Store(path / "samples.db", create=False) as store:
        begun = store.begun()
    return stats(path) if begun else None


def when(at: float) -> str:
    """Unix seconds as `2026-11-15 05:55:13 UTC`."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    except (OverflowError, ValueError, OSError):  # not a time that any clock gave
        return DASH


def _of_device(size: float | None) -> str:
    return f"the device holds {format_bytes(size)}" if size else ""


def _speed_bars(summary: Summary) -> list[Bar]:
    speed = summary.speed
    interval = (
        f"{exact(speed.update.low)} to {exact(speed.update.high)}"
        if speed.update and speed.update.low
        else ""
    )
    rows = [
        ("median update", speed.update.value if speed.update else None, "seen", interval),
        (
            ("whole run", speed.whole_run, "seen2", "everything included")
            if summary.workload == "pretrain"
            else ("fine-tuning", speed.whole_run, "seen2", "all of it; sampling and tests are not in it")
        ),
        ("attainable", speed.attainable, "limit", "predicted: roofline"),
        ("matmul ceiling", speed.ceiling, "limit", "predicted: matrix products alone"),
    ]
    return _bars(
        [(name, value, f"{exact(value)} {speed.unit}", kind, note) for name, value, kind, note in rows]
    )


def _bars(rows: list[tuple[str, float | None, str, str, str]]) -> list[Bar]:
    known = [(name, value, text, kind, note) for name, value, text, kind, note in rows if value]
    most = max((value for _, value, *_ in known), default=1.0)
    return [Bar(name, text, 100 * value / most, kind, note) for name, value, text, kind, note in known]


def _stack(parts: list[tuple[str, float, str, str]]) -> list[Bar]:
    whole = sum(value for _, value, *_ in parts)
    return [
        Bar(name, text, 100 * value / whole, _KINDS.get(name, f"p{i % 7}"), note)
        for i, (name, value, text, note) in enumerate(parts)
    ]


def plan_rows(run: Run) -> list[PlanRow]:
    """Every value of the plan that has a reason."""
    rows = []
    for name, entry in run.plan.items():
        if "value" in table(entry):
            given = entry["value"]
            large = isinstance(given, int) and abs(given) >= 10_000  # flops_per_token: read by its groups
            value = DASH if given in ("", None) else f"{given:,}" if large else str(given)
            rows.append(PlanRow(name, value, str(entry.get("source", "")), str(entry.get("reason", ""))))
    return rows


def event_rows(run: Run) -> list[EventRow]:
    """The events; of many the first and the last, so that a page of a long run is no longer than one of a
    short one."""
    first, last = run.events[:FIRST_EVENTS], run.events[FIRST_EVENTS:][-LAST_EVENTS:]
    if not (left_out := len(run.events) - len(first) - len(last)):
        return _event_rows(run.events)
    return [*_event_rows(first), EventRow("", f"{left_out:,} more in events.jsonl", ""), *_event_rows(last)]


def _event_rows(events: list[dict[str, Any]]) -> list[EventRow]:
    return [
        EventRow(
            when(number(event.get("at")) or math.inf),
            told(event["event"], event),
            "bad" if event["event"] in BAD else "",
        )
        for event in events
    ]


def accuracies(evaluations: list[dict[str, Any]]) -> list[Test]:
    """The accuracies of an RFT run, in the order of the record."""
    found = []
    for line in evaluations:
        shares = [
            number(line.get(name))
            for name in ("n", "accuracy", "accuracy_low", "accuracy_high", "answer_rate")
        ]
        if None in shares:
            continue
        n, *rest = [value for value in shares if value is not None]
        found.append(
            Test(
                TESTED.get(str(line.get("weights")), str(line.get("weights"))),
                int(n),
                str(line.get("split", "")),
                *rest,
            )
        )
    return found


def side_by_side(runs: list[RunView]) -> list[tuple[str, list[str]]]:
    """The comparison: one row a figure, one cell a run; speeds also as a factor of the first run's."""
    all_ = [run.summary for run in runs]
    covered, whole = (
        ("fine-tuning", "all of fine-tuning")
        if all(s.workload == "rft" for s in all_)
        else ("training", "whole run")
    )
    rows: list[tuple[str, list[str]]] = [
        ("recipe", [s.recipe for s in all_]),
        ("fingerprint", [s.fingerprint or DASH for s in all_]),
        ("machine", [s.hardware or DASH for s in all_]),
        ("state", [s.state.ending for s in all_]),
        ("updates", [f"{s.updates:,}" for s in all_]),
        ("speed, median update", [f"{exact(s.speed.update.value)} {s.speed.unit}" if s.speed.update else DASH for s in all_]),
        ("against the first", ["1×"] + [_factor(all_[0], s) for s in all_[1:]]),
        (f"speed, {whole}", [f"{exact(s.speed.whole_run)} tokens/s" if s.speed.whole_run else DASH for s in all_]),
        ("of the attainable", [format_limit_share(s.speed.attained_share) for s in all_]),
        ("MFU", [format_limit_share(s.speed.mfu) for s in all_]),
        ("of the matmul ceiling", [format_limit_share(s.speed.ceiling_share) for s in all_]),
        ("peak memory", [format_bytes(s.memory.seen_bytes) for s in all_]),
        (f"{covered} time", [format_duration(s.elapsed_s) for s in all_]),
        ("tokens", [format_count(s.tokens) for s in all_]),
        ("last training loss", [last_loss(s) for s in all_]),
        ("last validation loss", [_loss(s.quality.valid_loss) for s in all_]),
        ("best validation loss", [_loss(s.quality.best_loss) for s in all_]),
        ("accuracy after RFT", [next((f"{100 * t.accuracy:.1f} %" for t in run.tests if t.name == "after RFT"), DASH) for run in runs]),
    ]  # fmt: skip
    return [(name, cells) for name, cells in rows if any(cell != DASH for cell in cells)]


def last_loss(summary: Summary) -> str:
    """A loss that is no number any more is said before the last that was one, and a gradient that is none
    beside it."""
    quality = summary.quality
    if quality.nan_step is not None:
        return f"not a number from update {quality.nan_step:,}"
    return _loss(quality.last_loss) + (
        f", {bad_gradient(quality)}" if quality.bad_gradient_step is not None else ""
    )


def bad_gradient(quality: Quality) -> str:
    return f"but the gradient is not a number from update {quality.bad_gradient_step:,}"


def _loss(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f} nats/token"


def _factor(base: Summary, other: Summary) -> str:
    if (found := ratio(base, other)) is None:
        return DASH
    if found.low is None or found.high is None:
        return f"{factor(found.value)}× (too few updates for an interval)"
    resolved = "" if found.resolved else ", not resolved"
    return f"{factor(found.value)}× ({factor(found.low)} to {factor(found.high)}{resolved})"
