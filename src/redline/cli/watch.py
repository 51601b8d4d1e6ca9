"""Watch a run from its folder: the report in short in this terminal, or as a page that keeps up. Needs no
torch.

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
    from rich.live import Live

    from redline.cli.live import PlainView, Seen
    from redline.record.read import Run
    from redline.report.serve import Watched
    from redline.report.view import RunView

HELP = "watch a run from its folder, in the terminal or as a local page"
PORT = 8765
LOOK_EVERY_S = 0.5
NEXT_ROUND_S = 30.0
"""How long a round that has ended is watched for the next one: nothing in the folder says how many were asked
for."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the run folder")
    command.add_argument(
        "--web", action="store_true", help="as a page on 127.0.0.1 that keeps up, instead of in the terminal"
    )
    command.add_argument(
        "--port",
        type=int,
        default=None,
        metavar="N",
        help=f"port of the page (default {PORT}; 0: any that is free)",
    )


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

    place = latest_round(folder)
    with make_server(place, port) as server:
        status(f"watching {place} at {server.url} (this machine only); Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):  # the end that was announced, no interruption
            server.serve_forever()


def latest_round(folder: Path) -> Path:
    """The folder of the round that is under way; the folder itself where a run has none."""
    from redline.record.read import rounds_of

    return (rounds_of(folder) or [folder])[-1]


def _follow(folder: Path) -> None:
    """Show what is there, then what comes, until the record says that the run has ended; the rounds of an RFT
    run one after the other."""
    import sys

    from redline.cli.live import is_terminal

    view = (_Screen if is_terminal(sys.stdout) else _Plain)()
    try:
        place = latest_round(folder)
        while (following := _follow_one(folder, place, view)) is not None:
            place = following
    finally:
        view.close()


def _follow_one(folder: Path, place: Path, view: "_Screen | _Plain") -> Path | None:
    """Follow one run folder to its end, or until there is a later round, which is returned."""
    from redline.report.serve import Watched

    watched = Watched(place)
    found, generation = watched.now()
    view.begin(found, _ended_rounds(folder, place))
    shown = told = 0
    while True:
        for kind, record in in_order(found.metrics[shown:], found.events[told:]):
            if kind == "line":  # JSON has no nan
                view.metrics(
                    record | ({"loss": math.nan} if "loss" in record and record["loss"] is None else {})
                )
            else:
                view.event(record)
        shown, told = len(found.metrics), len(found.events)
        view.show(found, watched)
        if (following := latest_round(folder)) != place:
            return following
        if found.state.over and (place == folder or found.silent_s > NEXT_ROUND_S):
            return None
        # A run that was killed may be taken up again by its own command, so the watching goes on.
        calm = found.state.ending in ("running", "finished")
        view.note("" if calm else f"{found.state.ending}, {found.state.text} (Ctrl-C ends the watching)")
        time.sleep(LOOK_EVERY_S)
        found, now = watched.now()
        if now != generation:  # resumed from a checkpoint: what was behind it is computed again
            generation, shown = now, 0


def _ended_rounds(folder: Path, place: Path) -> list[str]:
    """`round-1: 63.0 % after RFT` for the rounds before this one."""
    from redline.record.read import rounds_of
    from redline.record.run import read_lines
    from redline.report.view import accuracies

    told = []
    for path in rounds_of(folder):
        tests = accuracies(read_lines(path / "evaluations.jsonl"))
        if path != place and tests:
            told.append(f"{path.name}: {100 * tests[-1].accuracy:.1f} % {tests[-1].name}")
    return told


def in_order(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Lines and events as they happened: an event of a step behind that step's line, one without a step
    behind the event before it."""
    step, placed = 0, []
    for event in events:
        step = event["step"] if isinstance(event.get("step"), int) else step
        placed.append((step, 1, "event", event))
    ordered = sorted(
        [*((line["step"], 0, "line", line) for line in lines), *placed], key=lambda entry: entry[:2]
    )
    return [(kind, record) for _, _, kind, record in ordered]


def _seen(found: "Run") -> "Seen":
    """What the view must know of the run before its first line."""
    from redline.cli.live import Seen
    from redline.cli.watch_screen import title_of
    from redline.record.read import number, table
    from redline.report.figures import summarise

    summary, train = summarise(found), table(found.recipe.get("train"))
    device = number(table(found.plan.get("hardware")).get("memory_bytes"))
    return Seen(
        title=title_of(found, summary),
        total_steps=summary.planned_updates,
        max_hours=number(train.get("max_hours")),
        peak_note=summary.speed.mfu_note,
        memory_total_bytes=None if device is None else int(device),
    )


def _facts(event: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Time of day, kind and facts of a recorded event."""
    from redline.record.read import number

    at = number(event.get("at"))
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else ""
    return (
        clock,
        str(event.get("event", "")),
        {name: value for name, value in event.items() if name not in ("at", "event")},
    )


class _Plain:
    """Lines for a pipe or a file, as `redline train` writes them; of an RFT run also what was sampled and
    tested."""

    def __init__(self) -> None:
        self._view: PlainView | None = None
        self._noted, self._said_at = False, -math.inf

    def begin(self, found: "Run", before: list[str]) -> None:
        import sys

        from redline.cli.live import PlainView

        self.close()  # a round that has ended
        self._view, self._tested, self._sampled = PlainView(_seen(found), sys.stdout), 0, ""

    def metrics(self, line: dict[str, Any]) -> None:
        assert self._view is not None, "begin() comes first"
        self._view.metrics(line)

    def event(self, event: dict[str, Any]) -> None:
        assert self._view is not None, "begin() comes first"
        _, kind, facts = _facts(event)
        self._view.event(kind, facts)

    def show(self, found: "Run", watched: "Watched") -> None:
        from redline.cli.live import PLAIN_EVERY_S
        from redline.cli.watch_screen import accuracy_lines, samples_line

        samples = watched.shown(found).samples
        line = samples_line(samples) if samples else ""
        if line != self._sampled and (found.state.over or time.monotonic() - self._said_at >= PLAIN_EVERY_S):
            print(line, flush=True)
            self._sampled, self._said_at = line, time.monotonic()
        tests = accuracy_lines(found)
        for test in tests[self._tested :]:
            print(f"accuracy {test}", flush=True)
        self._tested = len(tests)

    def note(self, text: str) -> None:
        if text and not self._noted:
            print(text, flush=True)
        self._noted = bool(text)

    def close(self) -> None:
        if self._view is not None:
            self._view.close()


class _Screen:
    """The report in short, redrawn; times of events are those of the record."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def begin(self, found: "Run", before: list[str]) -> None:
        from collections import deque

        from rich.console import Console
        from rich.live import Live

        self._seen, self._before, self._note = _seen(found), before, ""
        self._events: deque[str] = deque(maxlen=40)
        self._state: tuple[Run, RunView] | None = None
        if self._live is None:
            self._console = Console()
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()

    def metrics(self, line: dict[str, Any]) -> None:
        self._seen.add(line)

    def event(self, event: dict[str, Any]) -> None:
        from redline.cli.live import event_text

        clock, kind, facts = _facts(event)
        self._events.append(f"{clock}  {event_text(kind, facts)}")

    def show(self, found: "Run", watched: "Watched") -> None:
        from redline.cli.watch_screen import title_of

        shown = watched.shown(found)
        self._seen.title = title_of(found, shown.summary)  # the plan may come after the folder
        self._state = found, shown

    def note(self, text: str) -> None:
        self._note = text

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _render(self) -> Any:
        from redline.cli.watch_screen import screen

        if self._state is None:
            return "reading the run"
        found, shown = self._state
        rows = self._console.height - 1  # the cursor's line
        news = list(self._events)
        return screen(
            self._seen,
            found,
            shown,
            before=self._before,
            events=news,
            note=self._note,
            columns=self._console.width,
            rows=rows,
        )
