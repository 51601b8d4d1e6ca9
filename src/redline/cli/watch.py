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
    from redline.cli.watch_screen import PlainWatch, ScreenWatch

HELP = "watch a run in the terminal, or as a local page"
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
    from redline.cli.watch_screen import PlainWatch, ScreenWatch

    view = ScreenWatch() if is_terminal(sys.stdout) else PlainWatch(sys.stdout)
    with contextlib.closing(view):
        place: Path | None = latest_round(folder)
        while place is not None:
            place = _follow_one(folder, place, view)


def _follow_one(folder: Path, place: Path, view: "ScreenWatch | PlainWatch") -> Path | None:
    """Follow one run folder to its end, or until there is a later round, which is returned."""
    from redline.report.serve import Watched

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
        # A run that was killed may be taken up again by its own command, so the watching goes on.
        calm = found.state.over or found.state.ending == "running"
        note = "" if calm else f"{found.state.ending}, {found.state.text} (Ctrl-C ends the watching)"
        view.show(found, watched.shown(found), note)
        if (following := latest_round(folder)) != place:
            return following
        if found.state.over and (place == folder or found.silent_s > NEXT_ROUND_S):
            return None
        time.sleep(LOOK_EVERY_S)
        found, now = watched.now()
        if now != generation:  # resumed from a checkpoint: what was behind it is computed again
            generation, shown = now, 0


def _ended_rounds(folder: Path, place: Path) -> list[str]:
    """`round-1: 63.0 % after RFT` for the rounds before this one."""
    from redline.record.read import rounds_of
    from redline.record.run import read_lines
    from redline.report.view import accuracies

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
