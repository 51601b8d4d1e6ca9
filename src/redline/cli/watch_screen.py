"""What `redline watch` shows: the report in short on one screen of a terminal, or plain lines. Needs no torch.

    view = ScreenWatch()
    view.begin(shown, before=[])                 # a run, or the next round of one
    view.metrics(line); view.event(kind, facts)  # the record, as an observer gets it
    view.show(run, shown, note="")               # the run as it stands, and its figures

Findings with their fixes come first; the latest events take the room that is left. The plan's reasons and the curves
are on the page.
"""

import textwrap
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from redline.cli.live import (
    FRAME,
    PANEL_COLUMNS,
    REFRESHES_PER_S,
    PlainView,
    Row,
    Seen,
    panel,
    part,
    progress,
)
from redline.record.read import Run, number, table, values
from redline.record.units import DASH, format_count, format_duration, format_rate, format_share, sparkline
from redline.record.words import told
from redline.report.figures import Summary
from redline.report.grid import Output
from redline.report.view import RunView, accuracies

MOST_ROWS = 40
LABEL = 19
FEWEST_EVENTS = 2
MOST_FINDINGS = 3
FIRST_OF_PLAN = ("precision", "micro_batch", "accumulation", "compile", "recompute", "attention")
_STATES = {"running": "cyan", "finished": "green", "failed": "red"}


def stage_of(shown: RunView) -> dict[str, Any]:
    """The run as a stage, which a view needs before its first line."""
    run, summary, hardware = shown.run, shown.summary, shown.run.hardware
    return {
        "title": title_of(summary),
        "total_steps": summary.planned_updates,
        "max_hours": number(table(run.recipe.get("train")).get("max_hours")),
        "mfu_note": summary.speed.mfu_note,
        "device_bytes": number(hardware.get("memory_bytes")),
        "on_gpu": hardware.get("kind") == "cuda",
    }


def title_of(summary: Summary) -> str:
    """Name, size, hardware and precision of the run, as far as known."""
    size = f"{format_count(summary.parameters)} parameters" if summary.parameters else ""
    name = f"{summary.recipe}, {summary.label}" if summary.label.startswith("round-") else summary.recipe
    return " · ".join(part for part in (name, size, summary.hardware, summary.precision) if part)


def test_events(run: Run) -> list[dict[str, Any]]:
    """The accuracies of an RFT run as facts of the event `test`."""
    found = accuracies(run.evaluations)
    return [
        {"name": t.name, "accuracy_share": t.accuracy, "low_share": t.low, "high_share": t.high, "n": t.n}
        for t in found
    ]


class PlainWatch(PlainView):
    """Lines for a pipe or a file, as the run's own program writes them."""

    shows_end = True

    def begin(self, shown: RunView, before: Sequence[str]) -> None:
        self._tested, self._noted, self._sampled = 0, False, 0
        self.event("stage", stage_of(shown))

    def show(self, run: Run, shown: RunView, note: str) -> None:
        if (found := shown.samples) and found["samples"] != self._sampled:
            self._sampled = found["samples"]
            names = ("questions", "samples", "correct", "tokens_per_s")
            self.metrics({name: found[name] for name in names} | {"questions_done": found["asked"]})
        tests = test_events(run)
        for test in tests[self._tested :]:
            self.event("test", test)
        if note and not self._noted:
            self.event("note", {"text": note})
        self._tested, self._noted = len(tests), bool(note)


class ScreenWatch:
    """The report in short, redrawn; events show the times of the record."""

    def __init__(self) -> None:
        self._console = Output()
        self._live: Live | None = None

    def begin(self, shown: RunView, before: Sequence[str]) -> None:
        self._seen, self._before, self._note = Seen.of(stage_of(shown)), before, ""
        self._events: deque[str] = deque(maxlen=MOST_ROWS)
        self._run, self._shown = shown.run, shown
        if self._live is None:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_S
            )
            self._live.start()

    def metrics(self, line: dict[str, Any]) -> None:
        self._seen.add(line)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        at = number(facts.get("at"))
        clock = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else ""
        self._events.append(f"{clock}  {told(kind, facts)}")
        if kind == "stage":
            self._seen = Seen.of(facts)
        self._seen.begin(facts)

    def show(self, run: Run, shown: RunView, note: str) -> None:
        self._run, self._shown, self._note = run, shown, note

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _render(self) -> Panel:
        height = self._console.height - 1  # without the cursor's line
        size = min(self._console.width, PANEL_COLUMNS), min(height, MOST_ROWS)
        return screen(self._seen, self._run, self._shown, self._before, list(self._events), self._note, *size)


def screen(
    seen: Seen,
    run: Run,
    shown: RunView,
    before: Sequence[str],
    events: Sequence[str],
    note: str,
    columns: int,
    rows: int,
) -> Panel:
    """The screen. `run` is the run as it stands now, `shown` its figures, perhaps some seconds old; `before` the
    finished rounds of an RFT run."""
    room = columns - FRAME - LABEL
    ending = (run.state.ending, _STATES.get(run.state.ending, "yellow"))
    title = Text.assemble(ending, "  ", (title_of(shown.summary), "bold"), no_wrap=True, overflow="ellipsis")
    head: list[RenderableType] = [title, progress(seen)]
    figures = part("failed", Text(run.state.text, style="red")) if run.state.ending == "failed" else []
    figures += _figures(seen, run, shown, before, room)
    plan, remark = _plan(shown, room), part("", Text(note, style="yellow")) if note else []
    free = rows - 2 - len(head) - len(figures) - len(plan) - len(remark)
    findings = _findings(shown, room, free - FEWEST_EVENTS) if run.metrics else []
    latest = list(events)[-(free - len(findings)) :] if free > len(findings) else []
    below = part("events", *(Text(event, style="dim") for event in latest))
    body = [*figures, *findings, *plan, *below, *remark]
    return panel(head, body, columns, title="redline watch", label=LABEL)


def _figures(seen: Seen, run: Run, shown: RunView, before: Sequence[str], room: int) -> list[Row]:
    """The tiles of the page, a row each, with the loss as a curve and where the time went."""
    speed, rows = shown.summary.speed, list[Row]()
    shares = {"of the attainable speed": speed.attained_share, "of the matmul ceiling": speed.ceiling_share}
    for tile in shown.tiles:
        style = "bold red" if tile.kind == "bad" else "bold"
        told = Text.assemble(_gauge(shares.get(tile.label)), (tile.value, style), "  ", (tile.note, "dim"))
        rows += part(tile.label.removeprefix("of the "), told)
    if rewards := values(run.metrics, "reward"):
        rows += part("reward", Text.assemble(f"{rewards[-1]:.3f}  ", (sparkline(rewards, room - 8), "cyan")))
    if losses := values(run.metrics, "loss"):
        curve = (sparkline(losses, room - 8), "cyan")
        rows += part(
            "loss", Text.assemble(f"{losses[-1]:.3f}  ", curve, "×" if shown.summary.quality.nan_step else "")
        )
    elif run.workload != "rft" and not shown.tiles:
        rows += part("", "no update is recorded" if run.state.over else "waiting for the first update")
    left_s = None if run.state.over else seen.left_s()
    left = [] if left_s is None else [f"{format_duration(left_s)} left"]
    stack = sorted(shown.time_stack, key=lambda bar: -bar.percent)
    spent = [*left, *(f"{bar.name} {bar.percent:.1f} %" for bar in stack if bar.percent >= 0.05)]
    rows += part("time", *(_packed(spent, room, 2) if spent else ()))
    return rows + (_rft(seen, run, shown, before, room) if run.workload == "rft" else [])


def _packed(parts: Sequence[str], room: int, most: int) -> list[str]:
    """The parts in as few lines as needed, at most `most`; the page has the rest."""
    lines = textwrap.wrap(" · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts), room)
    kept = [line.replace("\N{NO-BREAK SPACE}", " ").removeprefix("· ") for line in lines[:most]]
    return kept if len(lines) <= most else [*kept[:-1], f"{kept[-1].removesuffix(' ·')} …"]


def _gauge(share: float | None) -> str:
    """A bar of sixteen columns."""
    filled = min(16, round(16 * (share or 0.0)))
    return "" if share is None else f"{'█' * filled}{'░' * (16 - filled)} "


def _findings(shown: RunView, room: int, most: int) -> list[Row]:
    """Each finding in two lines: what it is with its gain, and what to do. As many as fit in `most` lines, at least
    one."""
    if not shown.findings:
        return part("findings", *textwrap.wrap(shown.remark, room)) if shown.findings is not None else []
    lines: list[Text | str] = []
    count = max(1, min(MOST_FINDINGS, most // 2, len(shown.findings)))
    for place, finding in enumerate(shown.findings[:count], start=1):
        gain = f"  {found.low:.2f}–{found.high:.2f}×" if (found := finding.finding.gain) else ""
        title = Text(f"{place}. {finding.title}", style="bold")
        title.truncate(max(10, room - len(gain)), overflow="ellipsis")
        fix = textwrap.wrap(finding.fix, room - 3, max_lines=2 if most >= 3 * count else 1, placeholder=" …")
        lines += [Text.assemble(title, (gain, "green")), *(f"   {line}" for line in fix)]
    return part("findings", *lines)


def _plan(shown: RunView, room: int) -> list[Row]:
    known = {row.name: row.value for row in shown.plan if row.value != DASH}
    order = dict.fromkeys((*FIRST_OF_PLAN, *known))
    told = [f"{name.replace('_', ' ')} {known[name]}" for name in order if name in known]
    return part("plan", *_packed(told, room, 1)) if told else []


def _rft(seen: Seen, run: Run, shown: RunView, before: Sequence[str], room: int) -> list[Row]:
    rows = part("stage", Text(run.state.text if run.state.over else seen.title or "opening", style="bold"))
    if (found := shown.samples) is not None:
        speed = f" · {format_rate(found['tokens_per_s'], 'tokens')}" if found.get("tokens_per_s") else ""
        correct = f"{found['samples']:,}  {format_share(found['success_rate'])} correct{speed}"
        asked = f"questions: {found['asked']:,} of {found['questions']:,} asked, {found['solved']:,} solved"
        passed = " ".join(f"{k}: {value:.3f}" for k, value in found["pass_at"].items())
        rows += part("samples", correct, asked, f"pass@k {passed}")
    return rows + part("rounds", *before)
