"""Watch a run from its folder: the live view of `redline train` in this terminal, or the report as a page that keeps up. Needs no torch.

redline watch runs/nano                  ends when the run does
redline watch runs/nano --web            the page, on 127.0.0.1 only; Ctrl-C ends it
"""

import argparse
import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redline.cli.live import Seen

HELP = "watch a run from its folder, in the terminal or as a local page"
PORT = 8765
LOOK_EVERY_S = 0.5


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the run folder")
    command.add_argument("--web", action="store_true", help="as a page on 127.0.0.1 that keeps up, instead of in the terminal")
    command.add_argument("--port", type=int, default=None, metavar="N", help=f"port of the page (default {PORT}; 0: any that is free)")


def run(options: argparse.Namespace) -> None:
    if options.port is not None and not options.web:
        from redline.errors import ConfigError

        raise ConfigError(f"--port {options.port} is the page's: add --web")
    if options.web:
        _serve(options.run_folder, PORT if options.port is None else options.port)
    else:
        _follow(options.run_folder)


def _serve(folder: Path, port: int) -> None:
    from redline.cli.options import status
    from redline.report.serve import make_server

    with make_server(folder, port) as server:
        status(f"watching {folder} at {server.url} (this machine only); Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):  # the end that was announced, no interruption
            server.serve_forever()


def _follow(folder: Path) -> None:
    """Show what is there, then what comes, until the record says that the run has ended."""
    import sys

    from redline.cli.live import is_terminal
    from redline.report.serve import Watched

    watched = Watched(folder)
    found, generation = watched.now()
    if found.workload == "rft":
        from redline.errors import ConfigError

        raise ConfigError(f"{folder} is an RFT run, whose stages have no common measure of progress: watch its page with --web")
    view = (_Panel if is_terminal(sys.stdout) else _Plain)(_seen(found))
    shown = told = 0
    try:
        while True:
            for kind, record in in_order(found.metrics[shown:], found.events[told:]):
                if kind == "line":
                    view.metrics({**record, "loss": math.nan if record.get("loss") is None else record["loss"]})  # JSON has no nan
                else:
                    view.event(record)
            shown, told = len(found.metrics), len(found.events)
            if found.state.over:
                return
            # A run that was killed may be taken up again by its own command, so the watching goes on.
            view.note("" if found.state.ending == "running" else f"{found.state.ending}, {found.state.text} (Ctrl-C ends the watching)")
            time.sleep(LOOK_EVERY_S)
            found, now = watched.now()
            if now != generation:  # resumed from a checkpoint: what was behind it is computed again
                generation, shown = now, 0
    finally:
        view.close()


def in_order(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Lines and events as they happened: an event of a step behind that step's line, one without a step behind the event before it."""
    step, placed = 0, []
    for event in events:
        step = event["step"] if isinstance(event.get("step"), int) else step
        placed.append((step, 1, "event", event))
    ordered = sorted([*((line["step"], 0, "line", line) for line in lines), *placed], key=lambda entry: entry[:2])
    return [(kind, record) for _, _, kind, record in ordered]


def _seen(found: Any) -> "Seen":
    """What the view must know of the run before its first line."""
    from redline.cli.live import Seen
    from redline.record.units import format_count
    from redline.report.figures import summarise
    from redline.report.runs import number, table

    summary, train = summarise(found), table(found.recipe.get("train"))
    parts = [
        summary.recipe,
        f"{format_count(summary.parameters)} parameters" if summary.parameters else "",
        summary.hardware,
        summary.precision,
    ]
    device = number(table(found.plan.get("hardware")).get("memory_bytes"))
    return Seen(
        title=" · ".join(part for part in parts if part),
        total_steps=summary.planned_updates or max(1, summary.updates),
        max_hours=number(train.get("max_hours")),
        peak_note=summary.speed.mfu_note,
        memory_total_bytes=None if device is None else int(device),
    )


def _facts(event: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Time of day, kind and facts of a recorded event."""
    from redline.report.runs import number

    at = number(event.get("at"))
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else ""
    return clock, str(event.get("event", "")), {name: value for name, value in event.items() if name not in ("at", "event")}


class _Plain:
    """Lines for a pipe or a file, as `redline train` writes them."""

    def __init__(self, seen: "Seen") -> None:
        import sys

        from redline.cli.live import PlainView

        self.seen, self._view, self._noted = seen, PlainView(seen, sys.stdout), False

    def metrics(self, line: dict[str, Any]) -> None:
        self._view.metrics(line)

    def event(self, event: dict[str, Any]) -> None:
        _, kind, facts = _facts(event)
        self._view.event(kind, facts)

    def note(self, text: str) -> None:
        if text and not self._noted:
            print(text, flush=True)
        self._noted = bool(text)

    def close(self) -> None:
        self._view.close()


class _Panel:
    """The panel of `redline train`; times of events are those of the record."""

    def __init__(self, seen: "Seen") -> None:
        from collections import deque

        from rich.console import Console
        from rich.live import Live

        self.seen, self._note = seen, ""
        self._events: deque[str] = deque(maxlen=4)
        self._console = Console()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def metrics(self, line: dict[str, Any]) -> None:
        self.seen.add(line)

    def event(self, event: dict[str, Any]) -> None:
        from redline.cli.live import event_text

        clock, kind, facts = _facts(event)
        self._events.append(f"{clock}  {event_text(kind, facts)}")

    def note(self, text: str) -> None:
        self._note = text

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Any:
        from redline.cli.live import PANEL_COLUMNS, panel

        events = [*self._events, self._note] if self._note else list(self._events)
        return panel(self.seen, events, min(self._console.width, PANEL_COLUMNS))
