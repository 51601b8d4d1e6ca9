"""Find the fastest plan for a recipe on this machine by measuring: trials in separate processes, each kept only
if it is faster and computes the same training. `redline train RECIPE --plan auto` then uses the plan. If it is
killed, run the same command again: finished trials are not repeated.

redline tune nano --minutes 2
redline tune gpt2-124m --set data.source=data/wiki
redline tune rft/demo                                  the update of fine-tuning
redline tune nano --quality --seconds 30               the winner must also train equally well, over three seeds
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from redline.cli.options import ceilings_of, print_json, recipe_of, status, tokenise, verb_of
from redline.cli.plan import make
from redline.errors import ConfigError
from redline.machine.facts import MachineFacts, read_facts, software_key
from redline.measure.statistics import FEWEST_BLOCKS
from redline.measure.trial import TrialFolder
from redline.plan.plan import PLANNED, Plan, to_json
from redline.record.units import DASH, counted, format_bytes, format_duration, format_rate
from redline.report.grid import Grid, Output
from redline.tune.quality import Judge
from redline.tune.race import train_in_process
from redline.tune.search import FINAL, tune
from redline.tune.store import TrialRow, TuningResult, check_folder, tuning_folder

ARGUMENTS = """
@RECIPE
--minutes MINUTES   time for all trials together (default 6)
@QUALITY
--out DIR           the folder of the tuning (default: in the cache, where --plan auto looks)
@JSON
"""

SEEDS, SECONDS = 3, 60.0
"""The defaults of --quality, which its help names."""


def run(options: argparse.Namespace) -> None:
    of_quality(options)
    recipe, facts = recipe_of(options), read_facts()
    if options.out:  # what can be refused before anything is measured
        check_folder(options.out, recipe)
    tokenise(recipe)
    ceilings_of(facts)
    rules = make(options, recipe, nproc=1)
    if options.out:  # the folder in the cache is named after the work and the pins
        check_folder(options.out, recipe, rules)
    with TrialFolder(options.out or tuning_folder(facts, rules), software_key(facts)) as folder:
        judge = judge_of(options, folder.path / "quality", facts)
        plan, found = tune(recipe, rules, folder, minutes=options.minutes, progress=status, judge=judge)
    if options.json:
        result = asdict(found)
        rows = result.pop("rows")
        print_json({"folder": str(folder.path), "plan": to_json(plan), "trials": rows, "result": result})
        return
    print_result(plan, found, folder.path)
    print(f"use it: {train_command(options, recipe.workload)}")


def judge_of(options: argparse.Namespace, folder: Path, facts: MachineFacts) -> Judge | None:
    """The judge that trains both arms to the end, if --quality asks for it."""
    if not options.quality:
        return None
    return Judge(
        folder=folder, facts=facts, seeds=options.seeds or SEEDS, seconds=options.seconds or SECONDS,
        margin=options.margin, train=partial(train_in_process, progress=status), progress=status,
    )  # fmt: skip


def of_quality(options: argparse.Namespace) -> list[str]:
    """The options that say how to judge, as they were given; refused without --quality, where they do nothing."""
    given = {f"--{name}": getattr(options, name) for name in ("seeds", "seconds", "margin")}
    told = [part for name, value in given.items() if value is not None for part in (name, f"{value:g}")]
    if told and not options.quality:
        raise ConfigError(f"{told[0]} does nothing without --quality: add that, or leave it out")
    return told


def train_command(options: argparse.Namespace, workload: str = "pretrain") -> str:
    """The command that trains with the plan found. A plan from a file holds its pins and takes no others."""
    kept = [text for text in options.set if not (options.out and text.strip().startswith("plan."))]
    sets = [part for text in kept for part in ("--set", text)]
    plan = str(options.out / "plan.json") if options.out else "auto"
    return shlex.join(["redline", *verb_of(workload), options.recipe, *sets, "--plan", plan])


def print_result(plan: Plan, result: TuningResult, folder: Path) -> None:
    console = Output(markup=False)
    console.print(_table(result.rows))
    for row in result.rows:
        said = any(words in row.note for words in ("refused", "pays back"))
        if said or row.outcome != "ok" or row.verdict == "not compared":
            console.print(f"{row.name}: {row.note}")
    console.print(
        "tokens/s: median of the blocks; ratios with a 95% interval; memory: peak reserved by torch (on a"
        " CPU, resident memory)"
    )
    if any(_brief(row) for row in result.rows):
        console.print("* stopped after fewer rounds, each at least 3% slower: 87.5%")
    console.print(f"\n{gain(result)}", style="bold")
    if (quality := result.quality) is not None:
        stays = "" if quality.passed else f"; {result.against} stays"
        console.print(f"{quality.figure} at the end, {result.against} → the fastest plan: {quality}{stays}")
    for name in PLANNED:
        if (why := plan.why[name]).source == "measurement":
            console.print(f"  {name} {getattr(plan, name)}: {why.reason}")
    if result.untried:
        untried = ", ".join(result.untried)
        console.print(f"no time left for: {untried}; run the same command with more --minutes to try them")
    took = format_duration(result.elapsed_s)
    console.print(f"{counted(result.trials, 'trial')} in {took}; kept in {folder}")


def _table(rows: Sequence[TrialRow]) -> Grid:
    """The trials that were made; the untried are listed below the table."""
    shown = []
    for row in (row for row in rows if row.outcome is not None):
        found, speed = row.comparison, f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else DASH
        star = "*" if _brief(row) else ""
        ratio = f"{found.ratio:.3f}x [{found.low:.3f}, {found.high:.3f}]{star}" if found else DASH
        predicted = f"{row.predicted:.2f}x" if row.predicted is not None else DASH
        shown.append((row.name, speed, ratio, row.verdict, predicted, format_bytes(row.memory_bytes)))
    columns = ("trial", "tokens/s", "against the best so far", "verdict", "predicted", "memory")
    return Grid(columns, shown, right=(1, 2, 4), named_below=True)


def _brief(row: TrialRow) -> bool:
    """Whether the row's interval covers less than 95%."""
    return row.comparison is not None and row.rounds is not None and row.rounds < FEWEST_BLOCKS


def gain(result: TuningResult) -> str:
    speed = format_rate(result.tokens_per_s, "tokens")
    if result.ratio == 1.0:
        compared = [c for r in result.rows if (c := r.comparison) and (r.kept or r.name.startswith(FINAL))]
        how = "in turns with another" if compared and compared[-1].paired else "alone"
        return f"{result.against} is the fastest found: {speed} measured {how}"
    ratio = f"{result.ratio:.3f}x [{result.low:.3f}, {result.high:.3f}] {result.against}"
    if result.unconfirmed:
        return (
            f"{ratio} by the trials that chose it: {speed}; the last comparison with {result.against} failed"
            f" ({result.unconfirmed})"
        )
    return f"{ratio}, {'in turns' if result.paired else 'one after the other'}: {speed}"
