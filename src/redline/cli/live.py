"""The view of a running training: a panel that redraws itself in a terminal, plain lines anywhere else.

    view = make_view(title="nano · 3.2M parameters · cpu · fp32", total_steps=1000, max_hours=None, peak_note="...")
    view.metrics(line)                          # every line of metrics.jsonl
    view.event("checkpoint", {"step": 500})     # every event
    view.close()

`peak_note` spells out the convention of the MFU, or why there is none. Data wait and time left come from the
last WINDOW_STEPS steps, because a single step says little about them. Nothing in here may stop a run: output
that nobody takes is dropped.
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
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from redline.record.units import (
    DASH,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_share,
    sparkline,
)

WINDOW_STEPS = 60
PLAIN_EVERY_S = 2.0
REFRESHES_PER_S = 4
PANEL_COLUMNS = 110
_LABEL_COLUMNS = 11
_FRAME_COLUMNS = 4


class View(Protocol):
    """An observer of the training loop that shows what it sees."""

    def metrics(self, line: dict[str, Any]) -> None: ...

    def event(self, kind: str, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def make_view(
    *,
    title: str,
    total_steps: int,
    max_hours: float | None,
    peak_note: str,
    memory_total_bytes: int | None = None,
    quiet: bool = False,
    stream: TextIO | None = None,
) -> View:
    """The view for a stream (stdout unless given): a live panel in a terminal, else plain lines; nothing at
    all if quiet."""
    if quiet:
        return _Silence()
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that cannot show – must not end the run
    seen = Seen(
        title=title,
        total_steps=total_steps,
        max_hours=max_hours,
        peak_note=peak_note,
        memory_total_bytes=memory_total_bytes,
    )
    return LiveView(seen, Console(file=stream)) if is_terminal(stream) else PlainView(seen, stream)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at the stream through something that can redraw."""
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    return stream.isatty() and not dumb and os.environ.get("CI", "false").lower() in ("false", "0", "")


@dataclass
class Seen:
    """What both views know: the run, its last line, the recent ones, and what follows from them."""

    title: str
    total_steps: int | None
    """None where nobody planned how many: somebody else's loop that is watched."""
    max_hours: float | None
    peak_note: str
    memory_total_bytes: int | None = None
    last: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None
    """The last that was recorded: not every loop tells that of every update."""
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    validation: dict[str, Any] = field(default_factory=dict)
    smoothed_loss: float | None = None

    def add(self, line: dict[str, Any]) -> None:
        self.last = line
        self.recent.append(line)
        if line.get("valid_loss") is not None:
            self.validation = line
        if (loss := line.get("loss")) is None:
            return
        self.loss = loss
        if math.isfinite(loss):  # one nan would stay in the average for ever
            # The first lines are averaged evenly, later ones with a memory of about a third of the window.
            weight = max(1 / len(self.recent), 3 / WINDOW_STEPS)
            before = loss if self.smoothed_loss is None else self.smoothed_loss
            self.smoothed_loss = before + weight * (loss - before)

    def share_done(self) -> float:
        """By steps or by hours, whichever is further on, since that one ends the run."""
        by_steps = self.last.get("step", 0) / self.total_steps if self.total_steps else 0.0
        by_hours = self.last.get("elapsed_s", 0.0) / (self.max_hours * 3600) if self.max_hours else 0.0
        return min(1.0, max(by_steps, by_hours))

    def median_of(self, name: str) -> float | None:
        known = [line[name] for line in self.recent if line.get(name) is not None]
        return median(known) if known else None

    def wait_share(self) -> float | None:
        known = [line for line in self.recent if line.get("data_wait_s") is not None and line.get("step_s")]
        return (
            sum(line["data_wait_s"] for line in known) / sum(line["step_s"] for line in known)
            if known
            else None
        )

    def left_s(self) -> float | None:
        """From the median step: a compilation, a validation or a checkpoint among the recent steps does not
        move it."""
        step_s = self.median_of("step_s")
        if step_s is None or not (self.total_steps or self.max_hours):
            return None
        by_steps_s = (self.total_steps - self.last["step"]) * step_s if self.total_steps else math.inf
        by_hours_s = self.max_hours * 3600 - self.last.get("elapsed_s", 0.0) if self.max_hours else math.inf
        return max(0.0, min(by_steps_s, by_hours_s))


class _Silence:
    """The view of a quiet run."""

    def metrics(self, line: dict[str, Any]) -> None: ...

    def event(self, kind: str, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """One line for the first and the last step, for each tenth of the run, and else every PLAIN_EVERY_S; one
    for each event."""

    def __init__(self, seen: Seen, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._seen, self._stream, self._clock = seen, stream, clock
        self._printed_at, self._printed_tenth, self._printed_step = -math.inf, 0, 0
        self._print(seen.title)
        self._print(f"MFU: {seen.peak_note}")

    def metrics(self, line: dict[str, Any]) -> None:
        self._seen.add(line)
        due = self._clock() - self._printed_at >= PLAIN_EVERY_S  # always so for the first line
        if due or self._tenth() > self._printed_tenth or line["step"] == self._seen.total_steps:
            self._print_step()

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        self._print(f"event {event_text(kind, facts)}")

    def close(self) -> None:
        """The last step is not always the planned one: a limit in hours, an early stop, Ctrl-C."""
        if self._seen.last and self._seen.last["step"] != self._printed_step:
            self._print_step()

    def _tenth(self) -> int:
        return int(self._seen.share_done() * 10)

    def _print_step(self) -> None:
        self._printed_at, self._printed_tenth, self._printed_step = (
            self._clock(),
            self._tenth(),
            self._seen.last["step"],
        )
        self._print(plain_line(self._seen))

    def _print(self, text: str) -> None:
        # the reader of the pipe is gone; the record holds everything
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)


def plain_line(seen: Seen) -> str:
    """`step 120/1000  loss 3.412  lr 3.0e-04  41.2k tok/s  MFU –  mem 1.2 GiB  wait 0.3 %  left 2 m 10 s`."""
    line = seen.last
    parts = [
        f"step {line['step']}" + (f"/{seen.total_steps}" if seen.total_steps else ""),
        f"loss {_number(seen.loss, '.3f')}",
        f"lr {_number(line.get('lr'), '.1e')}",
        format_rate(line.get("tokens_per_s"), "tok"),
        f"MFU {format_share(line.get('mfu'))}",
        f"mem {format_bytes(line.get('memory_bytes'))}",
        f"wait {format_share(seen.wait_share())}",
        f"left {format_duration(seen.left_s())}",
    ]
    return "  ".join(parts)


class LiveView:
    """A panel that rich redraws from its own thread; the training only stores lines."""

    def __init__(self, seen: Seen, console: Console) -> None:
        self._seen, self._console = seen, console
        self._events: deque[str] = deque(maxlen=4)
        self._lock = threading.Lock()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_S)
        self._live.start()

    def metrics(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._seen.add(line)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(f"{time.strftime('%H:%M:%S')}  {event_text(kind, facts)}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._live.stop()

    def _render(self) -> Panel:
        with self._lock:  # only for the copy: the training must not wait for the drawing
            seen, events = replace(self._seen, recent=self._seen.recent.copy()), list(self._events)
        return panel(seen, events, min(self._console.width, PANEL_COLUMNS))


def panel(seen: Seen, events: Sequence[str], columns: int) -> Panel:
    """The whole picture; `columns` must be what the terminal has at least."""
    body: list[RenderableType] = [Text(seen.title, style="bold"), progress(seen)]
    if seen.last:
        body.append(_numbers(seen, room=columns - _FRAME_COLUMNS - _LABEL_COLUMNS))
    else:
        body.append(Text("waiting for the first step", style="dim"))
    body += [Text(event, style="dim", no_wrap=True, overflow="ellipsis") for event in events]
    return Panel(Group(*body), border_style="cyan", title="redline", title_align="left", width=columns)


def progress(seen: Seen) -> Table:
    """How far the run is, as a bar where somebody planned its end."""
    share = seen.share_done()
    if not (seen.total_steps or seen.max_hours):
        row = Table.grid()
        row.add_row(f"step {seen.last.get('step', 0)}")
        return row
    done = f"{format_share(share)}  step {seen.last.get('step', 0)}/{seen.total_steps or DASH}"
    if seen.max_hours:
        done += f"  {seen.last.get('elapsed_s', 0.0) / 3600:.2f}/{seen.max_hours:g} h"
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(ProgressBar(total=1.0, completed=share), done)
    return row


def _numbers(seen: Seen, room: int) -> Table:
    line = seen.last
    smoothed = f"smoothed {_number(seen.smoothed_loss, '.3f')} · lr {_number(line.get('lr'), '.1e')}"
    typical = (
        f"median {format_count(seen.median_of('tokens_per_s'))} · {format_duration(seen.median_of('step_s'))}"
        " a step"
    )
    rows = [
        ("loss", _number(seen.loss, ".3f"), smoothed),
        (
            "",
            sparkline([recent["loss"] for recent in seen.recent if recent.get("loss") is not None][-room:]),
            "",
        ),
        *_validation(seen.validation),
        ("speed", format_rate(line.get("tokens_per_s"), "tok"), typical),
        ("MFU", format_share(line.get("mfu")), f"({seen.peak_note})"),
        ("ceiling", format_share(line.get("ceiling_share")), "of the measured matmul rate"),
        (
            "memory",
            format_bytes(line.get("memory_bytes")),
            _memory_note(line.get("memory_bytes"), seen.memory_total_bytes),
        ),
        ("data wait", format_share(seen.wait_share()), "of the step"),
        ("time left", format_duration(seen.left_s()), f"after {format_duration(line.get('elapsed_s'))}"),
    ]
    table = Table.grid(expand=True)
    table.add_column(width=_LABEL_COLUMNS, no_wrap=True, style="dim")
    table.add_column(ratio=1)
    for label, value, note in rows:
        table.add_row(
            label, Text.assemble((value, "bold" if label else "cyan"), "  " if note else "", (note, "dim"))
        )
    return table


def _validation(line: dict[str, Any]) -> list[tuple[str, str, str]]:
    if not line:
        return []
    perplexity, bits = (
        _number(line.get("valid_perplexity"), ".4g"),
        _number(line.get("valid_bits_per_byte"), ".3f"),
    )
    note = f"perplexity {perplexity} · {bits} bits/byte · step {line['step']}"
    return [("validation", _number(line["valid_loss"], ".3f"), note)]


def _memory_note(used_bytes: int | None, total_bytes: int | None) -> str:
    if used_bytes is None or total_bytes is None:
        return "peak"
    return f"peak, {format_share(used_bytes / total_bytes)} of {format_bytes(total_bytes)}"


def event_text(kind: str, facts: dict[str, Any]) -> str:
    """`checkpoint  step 500  took 1.3 s`: the end of a name gives the unit."""
    return "  ".join(
        [kind.replace("_", " "), *(_fact(name, value) for name, value in facts.items() if value is not None)]
    )


def _fact(name: str, value: Any) -> str:
    numeric = isinstance(value, int | float)
    if numeric and name.endswith("_bytes"):
        name, value = name.removesuffix("_bytes"), format_bytes(value)
    elif numeric and name.endswith("_s"):
        name, value = name.removesuffix("_s"), format_duration(value)
    elif isinstance(value, float):
        value = f"{value:.4g}"
    return f"{name.replace('_', ' ')} {value}"


def _number(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)
