"""The view of running sampling: a panel that redraws itself in a terminal, plain lines anywhere else, like
`live` for training.

view = make_sampling_view("units · sampling 1,000 questions") view.progress({"questions": 1000,
"questions_done": 120, "samples": 3400, "correct": 1500, "tokens_per_s": 139e3, ...}) view.close()
"""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from redline.cli.live import PANEL_COLUMNS, PLAIN_EVERY_S, REFRESHES_PER_S, is_terminal
from redline.record.units import format_bytes, format_duration, format_rate, format_share


def make_sampling_view(title: str, stream: TextIO | None = None) -> "PlainSampling | LiveSampling":
    """The view for a stream (standard output unless given)."""
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that cannot show – must not end the run
    return LiveSampling(title, Console(file=stream)) if is_terminal(stream) else PlainSampling(title, stream)


def plain_line(facts: dict[str, Any]) -> str:
    """`questions 120/1,000  samples 3,400  correct 41.2 %  139.0k tok/s  mem 12.0 GiB  left 20 s`; what is
    not known is –."""
    parts = [
        f"questions {facts['questions_done']:,}/{facts['questions']:,}",
        f"samples {facts['samples']:,}",
        f"correct {format_share(success_rate(facts))}",
        format_rate(facts["tokens_per_s"], "tok"),
        f"mem {format_bytes(facts['memory_bytes'])}",
        f"left {format_duration(facts['left_s'])}",
    ]
    return "  ".join(parts)


def success_rate(facts: dict[str, Any]) -> float | None:
    """Share of the samples so far that are correct; None where they are scored at the end."""
    return None if facts["correct"] is None or not facts["samples"] else facts["correct"] / facts["samples"]


class PlainSampling:
    """A line at the first news, one every PLAIN_EVERY_S, and one at the end."""

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._printed_at: float | None = None
        self._waiting: dict[str, Any] | None = None
        self._print(title)

    def progress(self, facts: dict[str, Any]) -> None:
        self._waiting = facts
        if self._printed_at is None or self._clock() - self._printed_at >= PLAIN_EVERY_S:
            self._show()

    def close(self) -> None:
        if self._waiting is not None:
            self._show()

    def _show(self) -> None:
        assert self._waiting is not None
        self._print(plain_line(self._waiting))
        self._printed_at, self._waiting = self._clock(), None

    def _print(self, text: str) -> None:
        # the reader of the pipe is gone; the store holds everything
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)


class LiveSampling:
    """A panel that rich redraws from its own thread; who samples only stores the facts."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._lock = threading.Lock()
        self._facts: dict[str, Any] | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_S)
        self._live.start()

    def progress(self, facts: dict[str, Any]) -> None:
        with self._lock:
            self._facts = facts

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._live.stop()

    def _render(self) -> Panel:
        with self._lock:
            facts = self._facts
        return panel(self._title, facts, min(self._console.width, PANEL_COLUMNS))


def panel(title: str, facts: dict[str, Any] | None, columns: int) -> Panel:
    """The whole picture; `columns` must be what the terminal has at least."""
    if facts is None:
        body = Group(Text(title, style="bold"), Text("waiting for the first samples", style="dim"))
        return Panel(body, border_style="cyan", title="redline", title_align="left", width=columns)
    bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    share = facts["questions_done"] / max(1, facts["questions"])
    bar.add_row(
        ProgressBar(total=1.0, completed=share),
        f"{format_share(share)}  {facts['questions_done']:,}/{facts['questions']:,} questions",
    )
    table = Table.grid(expand=True)
    table.add_column(width=11, no_wrap=True, style="dim")
    table.add_column(ratio=1)
    for label, value, note in (
        (
            "samples",
            f"{facts['samples']:,}",
            f"at most {facts['samples_left']:,} to come" if facts.get("samples_left") else "",
        ),
        ("correct", format_share(success_rate(facts)), "of the samples"),
        ("speed", format_rate(facts["tokens_per_s"], "tok"), "new tokens"),
        ("memory", format_bytes(facts["memory_bytes"]), "peak on a GPU"),
        (
            "time left",
            format_duration(facts["left_s"]),
            f"at most, after {format_duration(facts['elapsed_s'])}",
        ),
    ):
        table.add_row(label, Text.assemble((value, "bold"), "  ", (note, "dim")))
    body = Group(Text(title, style="bold"), bar, table)
    return Panel(body, border_style="cyan", title="redline", title_align="left", width=columns)
