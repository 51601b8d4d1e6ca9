"""Say what a run is, what holds it back, what to change in that trainer's own options, and what to expect. Reads logs of
other trainers too, in whatever form. Needs no torch.

    redline diagnose runs/nano                         a run folder of ours
    redline diagnose train.log --fact gpu=h100-80g     what any trainer printed: text, JSON, CSV, a notebook, .xz or .gz
    redline diagnose a.log b.log c.log                 several runs beside each other
    redline diagnose train.log --html run.html         as a page, with the curves
    redline diagnose log.csv --map step_s=dt:ms        a column whose name does not say what it is, with its unit
    redline diagnose guide.md                          a page of claims: what in it cannot hold

Units that had to be guessed are said. A gain is a prediction; `redline bench train` measures.
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from redline.cli.arguments import JSON
from redline.cli.diagnose_view import print_answer, print_side_by_side
from redline.cli.options import print_json, status
from redline.diagnose.answer import mfu, split, too_little, verdict
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.errors import ConfigError
from redline.record.units import format_bytes

ARGUMENTS = f"""
PATH...                     a run folder, a log, a table, a notebook or a Markdown page
--map NAME=COLUMN[:UNIT]    what columns mean, with a unit where it differs: step=iter,step_s=dt:ms,memory_bytes=mem:GB
--fact NAME=VALUE...        what the log does not say, e.g. gpu=h100-80g, parameters=454M, gpus=8
--html FILE                 write it as one self-contained page, with the curves
{JSON}
"""
LARGE_BYTES = 4 * 2**20
"""A log of this size takes a second to read."""


def run(options: argparse.Namespace) -> None:
    facts, columns = (
        _pairs(options.fact, "--fact"),
        _pairs(filter(None, (options.map or "").split(",")), "--map"),
    )
    answers = []
    for path in options.path:
        if path.is_file() and (size := path.stat().st_size) >= LARGE_BYTES:
            status(f"reading {format_bytes(size)} of {path}")
        observed = read(path, columns=columns, facts=facts)
        answers.append((observed, diagnose(observed)))
    if options.html:
        from redline.report.diagnosis import write_page

        write_page(answers, options.html)
        status(f"written: {options.html}")
    if options.json:
        shown = [_as_json(observed, findings) for observed, findings in answers]
        print_json(shown[0] if len(shown) == 1 else shown)
        return
    if len(answers) > 1:
        print_side_by_side(answers)
    else:
        print_answer(*answers[0])


def _as_json(observed: Observed, findings: list[Finding]) -> dict[str, Any]:
    share, said = mfu(observed), verdict(observed, findings)
    return {
        "source": observed.source,
        "format": observed.format,
        "trainer": observed.trainer.name,
        "steps": len(observed.steps),
        "updates": observed.updates,
        "notes": observed.notes,
        "facts": asdict(observed.facts),
        "step_s": observed.median("step_s"),
        "mean_step_s": observed.mean("step_s"),
        "split_s": split(observed),
        "tokens_per_s": observed.tokens_per_s,
        "mfu": share[0] if share else None,
        "too_little": too_little(observed),
        "verdict": asdict(said),
        "findings": [asdict(finding) for finding in findings],
    }


def _pairs(given: Iterable[str], option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name or not value:
            raise ConfigError(f"{option} needs NAME=VALUE, got {text!r}")
        if name in pairs:
            raise ConfigError(f"{option} names {name} twice: {pairs[name]} and {value}")
        pairs[name] = value
    return pairs
