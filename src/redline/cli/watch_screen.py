"""The report of a run that is under way, on one screen of a terminal: each part of the page in a line or two.
Needs no torch.

    screen(seen, found, shown, events=["12:00:01  checkpoint  step 500"], note="", columns=80, rows=24)

What is shown depends on the room: the findings with their fixes come first, the latest events take what is
left. Every line is cut to the width, so that the picture never grows beyond the terminal. Left out: the
reasons behind the plan and the curves, which the page has.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from redline.cli.live import Seen, progress
from redline.record.read import Run, number
from redline.record.units import (
    DASH,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_share,
    sparkline,
)
from redline.report.figures import Summary, planned
from redline.report.numbers import exact
from redline.report.view import RunView, accuracies, last_loss

MOST_COLUMNS, MOST_ROWS = 110, 40
LABEL, FRAME = 11, 4
GAUGE = 16
FEWEST_EVENTS = 2
MOST_FINDINGS = 3
Line = tuple[str, Text]
"""A label, empty on the later lines of a part, and what stands beside it."""
_PLAN = (
    "precision",
    "micro_batch",
    "accumulation",
    "compile",
    "recompute",
    "attention",
    "cross_entropy",
    "update",
    "loader_threads",
)
_STATES = {"running": "cyan", "finished": "green", "failed": "red"}


def screen(
    seen: Seen,
    found: Run,
    shown: RunView,
    *,
    events: Sequence[str],
    note: str,
    columns: int,
    rows: int,
    before: Sequence[str] = (),
) -> Panel:
    """The whole picture. `found` is the run as it stands now, `shown` its figures, which may be some seconds
    old; `before` are the rounds of an RFT run that have ended."""
    columns, rows = min(columns, MOST_COLUMNS), min(rows, MOST_ROWS)
    room = columns - FRAME - LABEL
    head, plan = _head(seen, found), _plan(shown, room)
    lines = _part("failed", Text(found.state.text, style="red")) if found.state.ending == "failed" else []
    lines += (
        _rft(found, shown, before, room) if found.workload == "rft" else _training(seen, found, shown, room)
    )
    free = rows - 2 - len(head) - len(lines) - len(plan) - bool(note)
    findings = _findings(shown, room, free - FEWEST_EVENTS) if seen.last else []
    lines += findings + plan
    latest = list(events)[-(free - len(findings)) :] if free > len(findings) else []
    lines += _part("events", *(Text(event, style="dim") for event in latest))
    body: list[RenderableType] = [*head, *(_cut(label, text, columns - FRAME) for label, text in lines)]
    if note:
        body.append(Text(note, style="yellow", no_wrap=True, overflow="ellipsis"))
    return Panel(Group(*body), border_style="cyan", title="redline watch", title_align="left", width=columns)


def _head(seen: Seen, found: Run) -> list[RenderableType]:
    state = found.state
    title = Text.assemble(
        (seen.title, "bold"),
        "  ",
        (state.ending, _STATES.get(state.ending, "yellow")),
        no_wrap=True,
        overflow="ellipsis",
    )
    return [title] if found.workload == "rft" else [title, progress(seen)]


def _cut(label: str, text: Text, width: int) -> Text:
    line = Text.assemble((label.ljust(LABEL), "dim"), text)
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def _part(label: str, *lines: Text | str) -> list[Line]:
    return [
        (label if place == 0 else "", Text(line) if isinstance(line, str) else line)
        for place, line in enumerate(lines)
    ]


def _packed(parts: Sequence[str], room: int, most: int) -> list[str]:
    """The parts in as few lines as they need, at most `most`; those behind are left to the page."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(joined) <= room:
            lines[-1] = joined
        elif len(lines) < most:
            lines.append(part)
        else:
            lines[-1] += " …"
            break
    return lines


def _gauge(share: float) -> str:
    filled = min(GAUGE, round(GAUGE * share))
    return "█" * filled + "░" * (GAUGE - filled)


# ---- a training ----


def _training(seen: Seen, found: Run, shown: RunView, room: int) -> list[Line]:
    summary = shown.summary
    if not seen.last:
        return _part(
            "",
            Text(
                "no update is recorded" if found.state.over else "waiting for the first update", style="dim"
            ),
        )
    left = (
        [f"{format_duration(seen.left_s())} left"]
        if seen.left_s() is not None and not found.state.over
        else []
    )
    spent = [
        format_duration(shown.summary.elapsed_s if found.state.over else seen.last.get("elapsed_s")),
        *left,
    ]
    shares = [
        f"{bar.name} {bar.percent:.1f} %"
        for bar in sorted(shown.time_stack, key=lambda bar: -bar.percent)
        if bar.percent >= 0.05
    ]
    return [
        *_speed(summary),
        *_part("time", *_packed([*spent, *shares], room, 2)),
        *_memory(summary),
        *_loss(found, summary, room),
    ]


def _speed(summary: Summary) -> list[Line]:
    speed = summary.speed
    if speed.update is None:
        return []
    each = f"{format_duration(speed.step_s)} an update · " if speed.step_s else ""
    lines = [
        Text.assemble(
            (f"{exact(speed.update.value)} {speed.unit}", "bold"),
            f"  median · {each}MFU {format_share(speed.mfu)}",
        )
    ]
    for limit, name in (
        (speed.attainable, "attainable by roofline"),
        (speed.ceiling, "by the matmul ceiling"),
    ):
        if limit:
            share = speed.update.value / limit
            lines.append(Text(f"{_gauge(share)} {format_share(share)} of {exact(limit)} {name}"))
    if not speed.ceiling and speed.ceiling_share is not None:
        lines.append(
            Text(
                f"{_gauge(speed.ceiling_share)} {format_share(speed.ceiling_share)} of the measured matmul"
                " rate"
            )
        )
    return _part("speed", *lines)


def _memory(summary: Summary) -> list[Line]:
    memory = summary.memory
    parts = [
        f"{format_bytes(memory.predicted_bytes)} predicted" if memory.predicted_bytes else "",
        f"device {format_bytes(memory.device_bytes)}" if memory.device_bytes else "",
    ]
    seen = (f"{format_bytes(memory.seen_bytes)}", "bold"), " seen (process)" if memory.note else " seen"
    return _part("memory", Text.assemble(*seen, *(f" · {part}" for part in parts if part)))


def _loss(found: Run, summary: Summary, room: int) -> list[Line]:
    quality = summary.quality
    losses = [value for line in found.metrics if (value := number(line.get("loss"))) is not None]
    if not losses:
        return _part(
            "loss",
            Text(
                last_loss(summary) if quality.nan_step else DASH, style="red" if quality.nan_step else "dim"
            ),
        )
    each = -(-len(losses) // max(1, room - 20))
    blocks = [losses[i : i + each] for i in range(0, len(losses), each)]
    curve = sparkline([sum(block) / len(block) for block in blocks])
    now = Text.assemble(
        (f"{losses[-1]:.3f}", "bold"), "  ", (curve, "cyan"), ("×", "red") if quality.nan_step else ""
    )
    lines = _part("loss", now, *([Text(last_loss(summary), style="red")] if quality.nan_step else ()))
    tested = [line for line in found.metrics if number(line.get("valid_loss")) is not None]
    if not tested:
        return lines
    last, best = tested[-1], min(tested, key=lambda line: float(line["valid_loss"]))
    also = f" · perplexity {last['valid_perplexity']:.4g}" if number(last.get("valid_perplexity")) else ""
    also += f" · best {best['valid_loss']:.4f} at {best['step']:,}" if best is not last else ""
    return lines + _part(
        "validation",
        Text.assemble((f"{last['valid_loss']:.4f}", "bold"), f"  at update {last['step']:,}{also}"),
    )


def _findings(shown: RunView, room: int, most: int) -> list[Line]:
    """Each finding in two lines: what it is with the gain, and what to do. As many as fit in `most` lines,
    the first in any case."""
    if shown.findings is None:
        return []
    if not shown.findings:
        return _part("findings", *textwrap.wrap(shown.remark, room))
    lines: list[Text | str] = []
    count = max(1, min(MOST_FINDINGS, most // 2, len(shown.findings)))
    for place, finding in enumerate(shown.findings[:count], start=1):
        gain = f"  {found.low:.2f}–{found.high:.2f}×" if (found := finding.finding.gain) else ""
        title = Text(f"{place}. {finding.title}", style="bold")
        title.truncate(max(10, room - len(gain)), overflow="ellipsis")
        fix = textwrap.wrap(finding.fix, room - 3, max_lines=2 if most >= 3 * count else 1, placeholder=" …")
        lines += [Text.assemble(title, (gain, "green")), *(f"   {line}" for line in fix)]
    return _part("findings", *lines)


def _plan(shown: RunView, room: int) -> list[Line]:
    values = {row.name: row.value for row in shown.plan}
    known = [f"{name.replace('_', ' ')} {values[name]}" for name in _PLAN if values.get(name, DASH) != DASH]
    rest = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in values.items()
        if name not in _PLAN and value != DASH
    ]
    return _part("plan", *_packed([*known, *rest], room, 1)) if known or rest else []


# ---- rejection sampling ----


def _rft(found: Run, shown: RunView, before: Sequence[str], room: int) -> list[Line]:
    lines = _part("stage", Text(stage_of(found, shown), style="bold"))
    if (samples := shown.samples) is not None:
        lines += _samples(samples, room)
    if found.metrics:
        lines += _tuning(found, shown, room)
    return lines + _part("accuracy", *accuracy_lines(found)) + _part("rounds", *before)


def accuracy_lines(found: Run) -> list[str]:
    """`before 6.0 % (95 %: 1.0 to 16.0, n 100)`, in the order of the record."""
    tests = accuracies(found.evaluations)
    return [
        f"{test.name} {100 * test.accuracy:.1f} % (95 %: {100 * test.low:.1f} to {100 * test.high:.1f}, n"
        f" {test.n:,})"
        for test in tests
    ]


def samples_line(samples: dict[str, Any]) -> str:
    """`samples 3,400  correct 41.2 %  asked 120/240  solved 80`."""
    asked = f"asked {samples['asked']:,}/{samples['questions']:,}  solved {samples['solved']:,}"
    return f"samples {samples['samples']:,}  correct {format_share(samples['success_rate'])}  {asked}"


def _samples(samples: dict[str, Any], room: int) -> list[Line]:
    share = samples["asked"] / max(1, samples["questions"])
    speed = f" · {format_rate(samples['tokens_per_s'], 'tokens')}" if samples.get("tokens_per_s") else ""
    passed = [f"{k}: {value:.3f}" for k, value in samples["pass_at"].items()]
    return _part(
        "samples",
        Text.assemble(
            (f"{samples['samples']:,}", "bold"), f"  {format_share(samples['success_rate'])} correct{speed}"
        ),
        f"{_gauge(share)} {samples['asked']:,} of {samples['questions']:,} questions asked,"
        f" {samples['solved']:,} solved",
        *(_packed([f"pass@k {passed[0]}", *passed[1:]], room, 1) if passed else ()),
    )


def _tuning(found: Run, shown: RunView, room: int) -> list[Line]:
    last, summary = found.metrics[-1], shown.summary
    losses = [value for line in found.metrics if (value := number(line.get("loss"))) is not None][
        -(room - 30) :
    ]
    speed = f"{exact(summary.speed.update.value)} {summary.speed.unit} · " if summary.speed.update else ""
    memory = f"{format_bytes(last.get('memory_bytes'))} memory" if last.get("memory_bytes") else ""
    curve = Text.assemble(
        (f"{losses[-1]:.3f}" if losses else DASH, "bold"), "  ", (sparkline(losses), "cyan")
    )
    return _part("training", f"update {last['step']:,} · {speed}{memory}") + _part("loss", curve)


def stage_of(found: Run, shown: RunView) -> str:
    """What an RFT run does now, as far as its record says."""
    if found.state.over:
        return found.state.text
    ended = {str(event.get("event")) for event in found.events}
    if "training_on_samples" in ended:
        return "testing what was trained"
    if "sampling_end" in ended:
        return "fine-tuning on the samples"
    return "sampling" if shown.samples is not None else "opening the model, testing it before"


def title_of(found: Run, summary: Summary) -> str:
    """Name, size, hardware and precision of the run, as far as they are known."""
    size = f"{format_count(summary.parameters)} parameters" if summary.parameters else ""
    name = f"{summary.recipe}, {found.label}" if found.label.startswith("round-") else summary.recipe
    return " · ".join(part for part in (name, size, summary.hardware, planned(found, "precision")) if part)
