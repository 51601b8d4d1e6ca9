"""Watch a run from its folder: the live view that its own terminal shows, with what `redline diagnose` finds, or the
report's page as it grows. Needs no torch.

redline watch runs/nano                  until the run ends or is killed
redline watch runs/nano --web            the page, on 127.0.0.1 only; Ctrl-C ends it
"""

import argparse
import contextlib
import math
import time
from pathlib import Path
from textwrap import shorten
from typing import Any

from redline.cli.live import make_view
from redline.cli.options import status
from redline.errors import ConfigError
from redline.record.observe import Observer
from redline.record.read import Line, number, rounds_of, table
from redline.record.run import read_lines
from redline.record.units import format_count
from redline.report.serve import Watched, make_server
from redline.report.view import RunView, accuracies

PORT = 8765
ARGUMENTS = f"""
RUN        the run folder
--web      show a page on 127.0.0.1 that updates itself, instead of the terminal view
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
        with contextlib.closing(make_view(own=False)) as view:
            place: Path | None = latest_round(options.run)
            while place is not None:
                place = _follow(options.run, place, view)


def _serve(folder: Path, port: int) -> None:
    place = latest_round(folder)
    with make_server(place, port) as server:
        status(f"watching {place} at {server.url} (this machine only); Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):  # the announced way to end it
            server.serve_forever()


def latest_round(folder: Path) -> Path:
    """The folder of the round under way; the folder itself for a run without rounds."""
    return (rounds_of(folder) or [folder])[-1]


def _follow(folder: Path, place: Path, view: Observer) -> Path | None:
    """Show one run folder as it grows, to its end or until there is a later round, which is returned."""
    watched = Watched(place)
    found, generation = watched.now()
    view.event("stage", _stage(watched.shown(found)))
    for round_ in [path for path in rounds_of(folder) if path != place]:
        for line in _tests(read_lines(round_ / "evaluations.jsonl"))[-1:]:
            view.event("test", line | {"name": f"of {round_.name} {line['name']}"})
    seen, told, notes = 0, 0, _Notes(view)
    while True:
        for record in in_order(found.metrics[seen:], found.events[told:]):
            if record.get("event") == "stage" and record is not found.events[-1]:
                continue  # long ago: its panel would be empty
            if "event" in record:
                view.event(record["event"], record)
            else:  # JSON has no nan
                view.metrics(record | ({"loss": math.nan} if record.get("loss", 0.0) is None else {}))
        seen, told = len(found.metrics), len(found.events)
        notes.tell(watched.shown(found))
        # A run on another machine only falls silent, and may still be alive.
        if not found.state.over and found.state.ending != "running":
            notes.once(f"{found.state.ending} (Ctrl-C to stop watching)")
        if found.state.ending == "killed":
            notes.once(f"{found.state.text}; run its command again to resume it, and watch again")
        if (following := latest_round(folder)) != place:
            return following
        if found.state.over and (place == folder or found.silent_s > NEXT_ROUND_S):
            return None
        time.sleep(LOOK_EVERY_S)
        found, now = watched.now()
        if now != generation:  # resumed from a checkpoint: later updates are computed again
            generation, seen = now, 0


class _Notes:
    """What the record's lines and events do not say: samples and tests of an RFT run, an answer of an RL run, findings."""

    def __init__(self, view: Observer) -> None:
        self.view, self.told = view, set[str]()
        self.samples, self.tests, self.validations = 0, 0, 0
        self.slow: list[str] = []

    def once(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            self.view.event("note", {"text": text})

    def tell(self, shown: RunView) -> None:
        if (found := shown.samples) and found["samples"] != self.samples:
            self.samples = found["samples"]
            names = ("questions", "samples", "correct", "tokens_per_s")
            self.view.metrics({name: found[name] for name in names} | {"questions_done": found["asked"]})
        tests = _tests(shown.run.evaluations)
        for test in tests[self.tests :]:
            self.view.event("test", test)
        self.tests = len(tests)
        validations = sum(event["event"] == "validation" for event in shown.run.events)
        if shown.rl and shown.rl.said and validations > self.validations:
            self.validations, best = validations, shown.rl.said[0]
            asked, wrote = (shorten(text, 200, placeholder=" …") for text in (best.question, best.text))
            self.once(f"{best.domain}: {asked} It wrote: {wrote} ({best.note})")
        if shown.crew is not None and (slow := [m.name for m in shown.crew.members if m.kind]) != self.slow:
            self.slow = slow
            for said in shown.crew.said if slow else ():
                self.once(said)
        for finding in shown.findings or ():
            gain = f" ({finding.gain})" if finding.gain else ""
            self.once(f"finding: {finding.title}{gain}; fix: {finding.fix}")


def _stage(shown: RunView) -> dict[str, Any]:
    """The run as a stage, which a view needs before its first line."""
    run, summary, hardware = shown.run, shown.summary, shown.run.hardware
    size = f"{format_count(summary.parameters)} parameters" if summary.parameters else ""
    name = f"{summary.recipe}, {summary.label}" if summary.label.startswith("round-") else summary.recipe
    return {
        "title": " · ".join(part for part in (name, size, summary.hardware, summary.precision) if part),
        "total_steps": summary.planned_updates,
        "max_hours": number(table(run.recipe.get("train")).get("max_hours")),
        "mfu_note": summary.speed.mfu_note,
        "device_bytes": number(hardware.get("memory_bytes")),
        "on_gpu": hardware.get("kind") == "cuda",
    }


def _tests(evaluations: list[Line]) -> list[Line]:
    """The accuracies of an RFT run as facts of the event `test`."""
    return [
        {"name": t.name, "accuracy_share": t.accuracy, "low_share": t.low, "high_share": t.high, "n": t.n}
        for t in accuracies(evaluations)
    ]


def in_order(lines: list[Line], events: list[Line]) -> list[Line]:
    """Lines and events as they happened; an event without a step comes after the event before it."""
    step, placed = 0, []
    for event in events:
        step = event["step"] if isinstance(event.get("step"), int) else step
        placed.append(((step, 1), event))
    ordered = sorted([*(((line["step"], 0), line) for line in lines), *placed], key=lambda entry: entry[0])
    return [record for _, record in ordered]
