"""Say what a run is, what holds it back, which of its trainer's options to change, and what to expect. Also reads the
logs of other trainers, in any form. Needs no torch.

    redline diagnose runs/nano                         a run folder of ours
    redline diagnose train.log --fact gpu=h100-80g     what any trainer printed: text, JSON, CSV, a notebook, .xz or .gz
    redline diagnose a.log b.log c.log                 several runs side by side
    redline diagnose train.log --html run.html         as a page, with the curves
    redline diagnose log.csv --map step_s=dt:ms        a column whose name does not say what it is, with its unit
    redline diagnose guide.md                          a page of claims: which of them cannot be true

Units that had to be guessed are named. A gain is a prediction; `redline bench train` measures it.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from redline.cli.options import print_json, status
from redline.diagnose.answer import mfu, split, too_little, verdict, what_it_is
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.errors import ConfigError
from redline.record.units import DASH, format_bytes, format_count, format_duration, format_share
from redline.report.grid import Grid, Output, show

ARGUMENTS = """
PATH...                     a run folder, a log, a table, a notebook or a Markdown page
--map NAME=COLUMN[:UNIT]    what columns mean, with a unit where it differs: step=iter,step_s=dt:ms,memory_bytes=mem:GB
--fact NAME=VALUE...        what the log does not say, e.g. gpu=h100-80g, parameters=454M, gpus=8
--html FILE                 write the answer as one self-contained page, with the curves
@JSON
"""
LARGE_BYTES = 4 * 2**20
"""A log of this size takes a second to read."""


def run(options: argparse.Namespace) -> None:
    facts = _pairs(options.fact, "--fact")
    columns = _pairs(filter(None, (options.map or "").split(",")), "--map")
    answers = []
    for path in options.path:
        if path.is_file() and (size := path.stat().st_size) >= LARGE_BYTES:
            status(f"reading {format_bytes(size)} of {path}")
        observed = read(path, columns=columns, facts=facts)
        answers.append((observed, diagnose(observed)))
    if options.html:
        from redline.report.page import write_diagnosis

        write_diagnosis(answers, options.html)
        status(f"written to {options.html}")
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
    names = ("source", "format", "updates", "notes", "tokens_per_s")
    return {name: getattr(observed, name) for name in names} | {
        "trainer": observed.trainer.name,
        "steps": len(observed.steps),
        "facts": asdict(observed.facts),
        "step_s": observed.median("step_s"),
        "mean_step_s": observed.mean("step_s"),
        "split_s": split(observed),
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


_CERTAINTY = ((0.85, "high"), (0.6, "medium"), (0.0, "low"))


def print_answer(observed: Observed, findings: list[Finding]) -> None:
    console, parts = Output(), _split(observed)
    rows = [*what_it_is(observed), *([("an update", parts)] if parts else [])]
    rows += [("note", note) for note in observed.notes]
    show(("", ""), rows, title=observed.source)
    for number, finding in enumerate(findings, start=1):
        _print_finding(console, number, finding)
    said = verdict(observed, findings)
    if said.word in ("not judged", "fast enough") and said.text:
        console.print(f"\n[bold]{said.word.capitalize()}.[/bold] {escape(said.text)}")
    elif little := too_little(observed):
        console.print(f"\n{escape(little)}")


def _split(observed: Observed) -> str:
    """Where the update's time went, if it was measured."""
    step_s, known = observed.mean("step_s"), split(observed)
    if not step_s or not known:
        return ""
    shares = {name: value / step_s for name, value in known.items()}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    several = observed.plan.world_size > 1 if observed.plan else (observed.facts.gpus or 1) > 1
    hidden = several and "communication" not in known and "forward" in known
    return f"{shown} (means{'; communication is part of forward and backward' if hidden else ''})"


def _print_finding(console: Console, number: int, finding: Finding) -> None:
    gain = f"  [green]{finding.gain}[/green]" if finding.gain else ""
    console.print(f"\n[bold]{number}. {escape(finding.title)}[/bold]{gain}")
    rows = [(item.name, item.amount) for item in finding.evidence]
    rows.append(("fix", finding.fix))
    rows += [("gain", finding.gain.why)] if finding.gain else []
    sure = next(word for least, word in _CERTAINTY if finding.confidence >= least)
    rows.append(("confidence", f"{sure} ({finding.confidence:.0%}); cause: {finding.cause}"))
    console.print(Padding(Grid(("", ""), rows), (0, 0, 0, 3)))


def print_side_by_side(answers: Sequence[tuple[Observed, list[Finding]]]) -> None:
    """Several runs: a row each of what can be compared, then the first finding of each."""
    console, rows = Output(), []
    for number, (observed, findings) in enumerate(answers, start=1):
        share, gpus = mfu(observed), observed.facts.gpus
        speeds = format_duration(observed.median("step_s")), format_count(observed.tokens_per_s)
        shares = format_share(share[0] if share else None), f"{gpus:.0f}" if gpus else DASH
        rows.append((str(number), *speeds, *shares, verdict(observed, findings).word))
    show(("", "update", "tokens/s", "MFU", "GPUs", "verdict"), rows, right=range(1, 5))
    for number, (observed, findings) in enumerate(answers, start=1):
        title = observed.trainer.title or observed.format
        about = f"{escape(observed.source)} ({escape(title)}, {observed.updates:,} updates)"
        console.print(f"\n[bold]{number}[/bold] {about}")
        first = f"{findings[0].title}. Fix: {findings[0].fix}" if findings else ""
        console.print(Padding(escape(first or verdict(observed, findings).text), (0, 0, 0, 2)))
    console.print("\n`redline diagnose PATH` shows all findings of one run.")
