"""The live view of a run: a panel that redraws itself in a terminal, plain lines anywhere else.

    view = make_view()
    view.event("stage", {"title": "nano · cpu · fp32", "total_steps": 1000})      # then every line and event
    view.metrics(line)
    view.close()

An observer (record/observe.py) of training, sampling and tests. Besides `total_steps` or `questions` a stage
may give `max_hours`, `mfu_note` (the convention of the MFU, or why there is none), `device_bytes` and `on_gpu`.
Data wait and time left come from the last WINDOW_STEPS updates, because a single one says little.
Nothing here may stop a run: output that cannot be written is dropped.
"""

import contextlib
import io
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from textwrap import wrap
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from redline.record.observe import Observer, Observers
from redline.record.read import time_left_s
from redline.record.slowest import waited_for
from redline.record.units import (
    DASH,
    format_bytes,
    format_count,
    format_duration,
    format_limit_share,
    format_rate,
    format_share,
    sparkline,
    visible,
)
from redline.record.words import told, told_validation
from redline.report.grid import Output

WINDOW_STEPS = 60
PLAIN_EVERY_S = 2.0
REFRESHES_PER_S = 4
PANEL_COLUMNS = 110
LABEL, FRAME = 11, 4
"""Columns of a row's name, and of the panel's two edges."""
LEAST_ROOM = 8
"""Columns of a row's text in a terminal that is too narrow for any."""


def make_view(*, quiet: bool = False, own: bool = True, stream: TextIO | None = None) -> Observer:
    """A live panel if the stream (default: stdout) is a terminal, else plain lines; nothing if quiet. `own`: the view
    shows this program's own run, not one that it watches."""
    if quiet:
        return Observers()
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a character the terminal lacks must not end the run
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    redraws = stream.isatty() and not dumb and os.environ.get("CI", "false").lower() in ("false", "0", "")
    return LiveView(Output(file=stream)) if redraws else PlainView(stream, own=own)


@dataclass
class Seen:
    """What a view knows about the stage: how much there is to do, the last line, the recent ones."""

    title: str = ""
    total_steps: int | None = None
    """None where it is not known, as in a watched loop."""
    max_hours: float | None = None
    questions: int | None = None
    mfu_note: str = ""
    device_bytes: float | None = None
    on_gpu: bool = False
    last: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None
    """The last recorded one: a watched loop may not record every update's."""
    smoothed_loss: float | None = None
    validation: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, Any] = field(default_factory=dict)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    @classmethod
    def of(cls, stage: dict[str, Any]) -> "Seen":
        known = ("title", "total_steps", "max_hours", "questions", "mfu_note", "device_bytes", "on_gpu")
        return cls(**{name: stage[name] for name in known if stage.get(name) is not None})

    def add(self, line: dict[str, Any]) -> None:
        self.last = line
        self.recent.append(line)
        self.questions = line.get("questions", self.questions)
        if line.get("valid_loss", line.get("valid_accuracy")) is not None:
            self.validation = line
        if (loss := line.get("loss")) is None:
            return
        self.loss = loss
        if math.isfinite(loss):  # one nan would stay in the average
            # A plain average of the first lines, then an exponential one over a third of the window.
            weight = max(1 / len(self.recent), 3 / WINDOW_STEPS)
            before = loss if self.smoothed_loss is None else self.smoothed_loss
            self.smoothed_loss = before + weight * (loss - before)

    def begin(self, facts: dict[str, Any]) -> None:
        """Start an attempt at training: fine-tuning knows its number of updates only now."""
        self.total_steps = facts.get("updates") or self.total_steps
        self.hosts = facts.get("hosts") or self.hosts

    def share_done(self) -> float:
        """By updates or hours, whichever is further along, or by questions."""
        by_steps = self.last.get("step", 0) / self.total_steps if self.total_steps else 0.0
        by_hours = self.last.get("elapsed_s", 0.0) / (self.max_hours * 3600) if self.max_hours else 0.0
        asked = self.last.get("questions_done", 0) / self.questions if self.questions else 0.0
        return min(1.0, max(by_steps, by_hours, asked))

    def median_of(self, name: str) -> float | None:
        known = [line[name] for line in self.recent if line.get(name) is not None]
        return median(known) if known else None

    def wait_share(self) -> float | None:
        known = [line for line in self.recent if line.get("data_wait_s") is not None and line.get("step_s")]
        total_s = sum(line["step_s"] for line in known)
        return sum(line["data_wait_s"] for line in known) / total_s if known else None

    def left_s(self) -> float | None:
        if "step" in self.last:
            return time_left_s(list(self.recent), self.total_steps, self.max_hours)
        left_s: float | None = self.last.get("left_s")
        return left_s

    def slow(self) -> tuple[str, str]:
        """The process that holds up the others, and how long they wait for it."""
        for one in waited_for(list(self.recent), self.hosts):
            if one.slow:
                return one.process, f"slow: the others wait for it {format_share(one.waited)} of the time"
        return DASH, ""

    def done(self) -> str:
        """`step 502/1000  0.02/2 h`, `120/1,000 questions`."""
        if self.questions:
            return f"{self.last.get('questions_done', 0):,}/{self.questions:,} questions"
        steps = f"step {self.last.get('step', 0)}" + (f"/{self.total_steps}" if self.total_steps else "")
        spent_h = self.last.get("elapsed_s", 0.0) / 3600
        return steps + (f"  {spent_h:.2f}/{self.max_hours:g} h" if self.max_hours else "")


def success_rate(line: dict[str, Any]) -> float | None:
    """Share of correct samples so far; None if they are scored at the end."""
    return None if line.get("correct") is None or not line["samples"] else line["correct"] / line["samples"]


class PlainView:
    """Prints a line at the start and end of a stage, every PLAIN_EVERY_S, and for each event except the end of the
    program's own run, which its command reports."""

    def __init__(
        self, stream: TextIO, *, own: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seen, self._stream, self._own, self._clock = Seen(), stream, own, clock
        self._printed_at, self._waiting = -math.inf, False

    def metrics(self, line: dict[str, Any]) -> None:
        self._seen.add(line)
        self._waiting = True
        if self._clock() - self._printed_at >= PLAIN_EVERY_S:  # always true for the first line
            self._flush()

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "stage":
            self.close()
            self._seen, self._printed_at = Seen.of(facts), -math.inf
            self._print(told(kind, facts))
            if self._seen.mfu_note:
                self._print(f"MFU: {self._seen.mfu_note}")
            return
        self._seen.begin(facts)
        if kind != "end" or not self._own:
            self.close()  # the update that the event follows comes first
            self._print(told(kind, facts))

    def close(self) -> None:
        """Flush: the last update is not always the planned one: a limit in hours, an early stop, Ctrl-C."""
        if self._waiting:
            self._flush()

    def _flush(self) -> None:
        self._printed_at, self._waiting = self._clock(), False
        self._print(plain_line(self._seen))

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader of the pipe has gone
            print(visible(text), file=self._stream, flush=True)


def figures(seen: Seen) -> list[tuple[str, str, str, str]]:
    """The known figures: name, value, note for the panel, form in a plain line (empty: not shown there)."""
    line, checked, sampled = seen.last, seen.validation, "samples" in seen.last
    drawn = line.get("samples") if line.get("samples") != line.get("questions_done") else None
    to_come = f"at most {line['samples_left']:,} to come" if line.get("samples_left") else ""
    typical = f"median {format_count(seen.median_of('tokens_per_s'))} · {format_duration(seen.median_of('step_s'))} a step"
    after = f"after {format_duration(line.get('elapsed_s'))}"
    used, device = line.get("memory_bytes") or 0, seen.device_bytes
    of_what = f"peak, {format_share(used / device)} of {format_bytes(device)}" if device else "peak"
    domains = [(name.removeprefix("reward."), line[name]) for name in line if name.startswith("reward.")]
    rewards = [f"{name} {_fixed(value, '.2f')}" for name, value in domains]
    # without the perplexity per word, so that the line fits 80 columns
    checked_by = [part for part in told_validation(checked) if not part.endswith("per word")]
    rewarded = ", ".join([f"{format_share(line.get('accuracy'))} correct", *rewards])
    rows = [
        ("samples", _fixed(drawn, ","), to_come, "{} sample" if drawn == 1 else "{} samples"),
        ("correct", format_share(success_rate(line)), "of the samples", "{} correct"),
        ("reward", _fixed(line.get("reward"), ".3f"), rewarded, "reward {}"),
        ("loss", _fixed(seen.loss, ".3f"), f"smoothed {_fixed(seen.smoothed_loss, '.3f')}", "loss {}"),
        ("validation", _fixed(checked.get("valid_loss"), ".3f"), " · ".join(checked_by), ""),
        ("held out", format_share(checked.get("valid_accuracy")), "answered correctly", "held out {}"),
        ("lr", _fixed(line.get("lr"), ".1e"), "", "lr {}"),
        ("speed", format_rate(line.get("tokens_per_s"), "tok"), "new tokens" if sampled else typical, "{}"),
        ("workers", *_workers(line.get("workers"))),
        ("MFU", format_limit_share(line.get("mfu")), f"({seen.mfu_note})" if seen.mfu_note else "", "MFU {}"),
        ("ceiling", format_limit_share(line.get("ceiling_share")), "of the measured matmul rate", ""),
        (
            "memory",
            format_bytes(line.get("memory_bytes")),
            of_what if seen.on_gpu else "of this process",
            "mem {}",
        ),
        ("data wait", format_share(seen.wait_share()), "of the step", "wait {}"),
        ("slowest", *seen.slow(), "waits for {}"),
        ("time left", format_duration(seen.left_s()), after, "left {}"),
    ]
    return [row for row in rows if row[1] != DASH]


def _workers(rates: dict[str, float] | None) -> tuple[str, str, str]:
    """The number of workers and their samples/s: slowest and fastest for the panel, the mean for a plain line."""
    if not rates:
        return DASH, "", ""
    slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    note = f"{slow} {rates[slow]:.3g} to {fast} {rates[fast]:.3g} samples/s"
    if len(rates) == 1:
        return "1", f"{rates[slow]:.3g} samples/s", f"{{}} worker, {rates[slow]:.3g} samples/s"
    mean = sum(rates.values()) / len(rates)
    return f"{len(rates):,}", note, f"{{}} workers, {mean:.3g} samples/s each"


def _fixed(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def plain_line(seen: Seen) -> str:
    """`step 120/1000  loss 3.412  lr 3.0e-04  41.2k tok/s  mem 1.2 GiB  wait 0.3%  left 2 m 10 s`, or for
    sampling `120/1,000 questions  3,400 samples  41.2% correct  139.0k tok/s  ...`."""
    return "  ".join([seen.done(), *(short.format(value) for _, value, _, short in figures(seen) if short)])


class LiveView:
    """A panel that rich redraws from its own thread. The panel of a finished stage stays on screen."""

    def __init__(self, console: Console) -> None:
        self._console, self._lock, self._seen = console, threading.Lock(), Seen()
        self._events: deque[str] = deque(maxlen=4)
        self._live: Live | None = None

    def metrics(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._seen.add(line)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "stage":
            self.close()
            with self._lock:
                self._seen = Seen.of(facts)
                self._events.clear()
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_S
            )
            self._live.start()
        elif self._live is None:
            self._console.print(Text(told(kind, facts), style="dim"))
        else:
            with self._lock:
                self._seen.begin(facts)
                at = time.localtime(facts.get("at"))  # the record's time, or now
                self._events.append(f"{time.strftime('%H:%M:%S', at)}  {told(kind, facts)}")

    def close(self) -> None:
        live, self._live = self._live, None
        with contextlib.suppress(OSError):  # the terminal was closed
            if live is not None:
                live.stop()

    def _render(self) -> Panel:
        with self._lock:  # only for the copy: the program must not wait for drawing
            seen, events = replace(self._seen, recent=self._seen.recent.copy()), list(self._events)
        return live_panel(seen, events, min(self._console.width, PANEL_COLUMNS))


def live_panel(seen: Seen, events: Sequence[str], columns: int) -> Panel:
    """The panel, its rows cut to the width so that it keeps its height; the terminal must have `columns` columns."""
    rows, room = Table.grid(), max(LEAST_ROOM, columns - FRAME - LABEL)
    rows.add_column(width=LABEL, style="dim", no_wrap=True)
    rows.add_column(width=room, no_wrap=True, overflow="ellipsis")
    if not seen.last:
        rows.add_row("", "waiting for the first numbers")
    losses = [line["loss"] for line in seen.recent if line.get("loss") is not None]
    for label, value, note, _ in figures(seen):
        rows.add_row(label, Text.assemble((value, "bold"), "  ", (note, "dim")))
        if label == "loss":
            rows.add_row("", Text(sparkline(losses[-room:]), style="cyan"))
    lines = [Text(line) for event in events for line in wrap(event, room, max_lines=2, placeholder=" …")]
    for label, line in zip(("events", *[""] * len(lines)), lines, strict=False):
        rows.add_row(label, line)
    body = Group(Text(seen.title, style="bold"), progress(seen), rows)
    return Panel(body, border_style="cyan", title="redline", title_align="left", width=columns)


def progress(seen: Seen) -> Table:
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    if not (seen.total_steps or seen.max_hours or seen.questions):
        row.add_row(seen.done())
        return row
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    share = seen.share_done()
    row.add_row(ProgressBar(total=1.0, completed=share), f"{format_share(share)}  {seen.done()}")
    return row
