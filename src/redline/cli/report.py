"""Show what run folders say: speed against the ceiling, where the time went, memory, curves, findings, the
plan. Needs no torch.

redline report runs/nano                          tables here, and runs/nano/report.html: one page that opens
                                                  anywhere, offline
redline report runs/a runs/b --out compare.html   side by side, with a verdict on whether they can be compared
redline report runs/rft                           the rounds of an RFT run side by side
"""

import argparse
import os
from dataclasses import asdict
from os.path import exists
from pathlib import Path
from typing import Any

from redline.cli.options import print_json, status
from redline.record.read import metrics_path, rounds_of
from redline.record.units import format_bytes
from redline.report.compare import Comparable
from redline.report.grid import Output
from redline.report.page import write_page
from redline.report.terminal import print_report
from redline.report.view import RunView, views

ARGUMENTS = """
RUN...       run folders
--out FILE   where the page goes (default: report.html in the first run's folder, or here if that is read-only)
@JSON
"""
LONG_BYTES = 8 * 2**20
"""Metrics that take more than about two seconds to read."""


def run(options: argparse.Namespace) -> None:
    paths = [path for given in options.run for path in rounds_of(given) or [given]]
    for path in paths:
        if exists(place := metrics_path(path)) and (size := place.stat().st_size) > LONG_BYTES:
            status(f"reading {format_bytes(size)} of metrics in {path}")
    runs = views(paths)
    out = options.out or _beside(options.run[0])
    write_page(runs, out)
    if options.json:
        found: dict[str, Any] = {"page": str(out), "runs": [_figures(shown) for shown in runs]}
        if len(runs) > 1:
            found["comparable"] = Comparable([shown.run for shown in runs])
        print_json(found)
        return
    print_report(runs, Output())
    status(f"page: {out}")


def _beside(folder: Path) -> Path:
    writable = os.access(folder, os.W_OK)
    return folder / "report.html" if writable else Path(f"{folder.resolve().name}-report.html")


def _figures(shown: RunView) -> dict[str, Any]:
    """Everything on the page but its curves, which are the folder's metrics.jsonl."""
    run = shown.run
    time = [part._asdict() for part in shown.summary.time]
    return vars(shown.summary) | {
        "time": time,
        "findings": None if shown.findings is None else [asdict(finding) for finding in shown.findings],
        "plan": run.plan,
        "events": run.events,
        "evaluations": run.evaluations,
        "samples": shown.samples,
        "rl": shown.rl,
        "crew": [member._asdict() for member in shown.crew.members] if shown.crew else None,
        "ablation": run.ablation,
    }
