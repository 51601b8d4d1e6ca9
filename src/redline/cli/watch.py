"""Watch a run from its folder: the report in short in this terminal, or as a page that keeps up. Needs no
torch.

redline watch runs/nano                  ends when the run does
redline watch runs/nano --web            the page, on 127.0.0.1 only; Ctrl-C ends it
"""

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

from redline.cli.live import is_terminal
from redline.cli.options import status
from redline.cli.watch_screen import PlainWatch, ScreenWatch
from redline.errors import ConfigError
from redline.record.read import rounds_of
from redline.record.run import read_lines
from redline.report.serve import Watched, make_server
from redline.report.view import accuracies

PORT = 8765
ARGUMENTS = f"""
RUN        the run folder
--web      as a page on 127.0.0.1 that keeps up, instead of in the terminal
--port N   port of the page (default: {PORT}; 0 for any free one)
"""
LOOK_EVERY_S = 0.5
NEXT_ROUND_S = 30.0
"""How long to wait for the next round after one has ended: the folder does not say how many were asked for."""


def run(options: argparse.Namespace) -> None:
    if options.web:
        _serve(options.run, PORT if options.port is None else options.port)
    elif options.port is not None:
        raise ConfigError(f"--port {options.port} is for the page: add --web")
    else:
        _follow(options.run)


def _serve(folder: Path, port: int) -> None:
    place = latest_round(folder)
    with make_server(place, port) as server:
        status(f"watching {place} at {server.url} (this machine only); Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):  # the announced way to end it
            server.serve_forever()


def latest_round(folder: Path) -> Path:
    """The folder of the round under way; the folder itself for a run without rounds."""
    return (rounds_of(folder) or [folder])[-1]


def _follow(folder: Path) -> None:
    """Show the run as it stands and then as it grows, until the record says that it has ended."""
    view = ScreenWatch() if is_terminal(sys.stdout) else PlainWatch(sys.stdout)
    with contextlib.closing(view):
        place: Path | None = latest_round(folder)
        while place is not None:
            place = _follow_one(folder, place, view)


def _follow_one(folder: Path, place: Path, view: ScreenWatch | PlainWatch) -> Path | None:
    """Follow one run folder to its end, or until there is a later round, which is returned."""
    watched = Watched(place)
    found, generation = watched.now()
    view.begin(watched.shown(found), _ended_rounds(folder, place))
    shown = told = 0
    while True:
        for record in in_order(found.metrics[shown:], found.events[told:]):
            if "event" in record:
                view.event(record["event"], record)
            else:  # JSON has no nan
                view.metrics(record | ({"loss": math.nan} if record.get("loss", 0.0) is None else {}))
        shown, told = len(found.metrics), len(found.events)
        # A killed run may be resumed by its own command, so keep watching.
        calm = found.state.over or found.state.ending == "running"
        note = "" if calm else f"{found.state.ending}, {found.state.text} (Ctrl-C to stop watching)"
        view.show(found, watched.shown(found), note)
        if (following := latest_round(folder)) != place:
            return following
        if found.state.over and (place == folder or found.silent_s > NEXT_ROUND_S):
            return None
        time.sleep(LOOK_EVERY_S)
        found, now = watched.now()
        if now != generation:  # resumed from a checkpoint: later updates are computed again
            generation, shown = now, 0


def _ended_rounds(folder: Path, place: Path) -> list[str]:
    """`round-1: 63.0 % after RFT` for the rounds before this one."""
    from redline.record.read import rounds_of

    tests = {path.name: accuracies(read_lines(path / "evaluations.jsonl")) for path in rounds_of(folder)}
    return [
        f"{name}: {100 * found[-1].accuracy:.1f} % {found[-1].name}"
        for name, found in tests.items()
        if name != place.name and found
    ]


def in_order(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines and events as they happened: an event of a step behind that step's line, one without a step behind
    the event before it."""
    step, placed = 0, []
    for event in events:
        step = event["step"] if isinstance(event.get("step"), int) else step
        placed.append(((step, 1), event))
    ordered = sorted([*(((line["step"], 0), line) for line in lines), *placed], key=lambda entry: entry[0])
    return [record for _, record in ordered]
