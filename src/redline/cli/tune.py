"""Find the fastest plan for a recipe on this machine by measuring: trials in processes of their own, kept only if faster and the same
training. `redline train RECIPE --plan auto` then uses it. Killed, the same command goes on; finished trials are not repeated.

redline tune nano --minutes 2
redline tune gpt2-124m --set data.source=data/wiki
"""

import argparse
import shlex
from pathlib import Path

HELP = "find the fastest plan for a recipe on this machine"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json, add_recipe

    add_recipe(command)
    command.add_argument("--minutes", type=float, default=6.0, metavar="M", help="time for all trials together (default 6)")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder of the tuning (default: in the cache, where --plan auto looks)"
    )
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from redline.cli.options import byte_progress, check_positive, print_json, recipe_of, status
    from redline.cli.plan import make
    from redline.data.build import prepare
    from redline.machine.facts import read_facts
    from redline.machine.store import cached
    from redline.plan.plan import to_json
    from redline.tune.search import tune
    from redline.tune.store import TuningFolder, check_folder, tuning_folder

    check_positive("--minutes", options.minutes)
    recipe, facts = recipe_of(options), read_facts()
    if options.out:  # the folder in the cache is named after the recipe's fingerprint
        check_folder(options.out, recipe)
    if not recipe.data.stream:
        prepare(recipe.data, recipe.model.vocab_size, progress=byte_progress("tokenising"))
    if cached(facts) is None:
        from redline.machine.ceilings import load_or_measure

        status("measuring this machine's ceilings, once")
        load_or_measure(facts, progress=status)
    rules = make(options, recipe, nproc=1)
    with TuningFolder(options.out or tuning_folder(facts, rules)) as folder:
        tuned = tune(recipe, rules, folder, minutes=options.minutes, progress=status)
    if options.json:
        rows = [asdict(row) for row in tuned.rows]
        print_json({"folder": str(folder.path), "plan": to_json(tuned.plan), "result": asdict(tuned.result), "trials": rows})
        return
    _print(tuned, folder.path)
    print(f"use it: {train_command(options)}")


def train_command(options: argparse.Namespace) -> str:
    """What trains with the plan that was found. A plan from a file holds its pins, and takes none beside it."""
    sets = [part for text in options.set if not (options.out and text.strip().startswith("plan.")) for part in ("--set", text)]
    return shlex.join(["redline", "train", options.recipe, *sets, "--plan", str(options.out / "plan.json") if options.out else "auto"])


def _print(tuned, folder: Path) -> None:  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.table import Table

    from redline.plan.plan import PLANNED
    from redline.record.units import format_bytes, format_duration, format_rate
    from redline.tune.statistics import interval

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("trial", "tokens/s", "against the best then", "verdict", "predicted", "memory"):
        table.add_column(column, justify="left" if column in ("trial", "verdict") else "right")
    for row in tuned.rows:
        measured, found = row.measured, row.comparison
        if measured is None:
            continue
        speed = f"{measured.tokens_per_step / interval(measured.blocks_s).median:,.0f}" if measured.blocks_s else "–"
        ratio = f"{found.ratio:.3f}x [{found.low:.3f}, {found.high:.3f}]" if found else "–"
        verdict = "kept" if row.kept else measured.outcome if found is None else found.verdict
        predicted = f"{row.predicted:.2f}x" if row.predicted is not None else "–"
        table.add_row(row.name, speed, ratio, verdict, predicted, format_bytes(measured.memory.reserved_bytes if measured.memory else None))
    console = Console()
    console.print(table)
    for row in tuned.rows:
        if row.measured is None or row.measured.outcome != "ok" or "refused" in row.note or "pays back" in row.note:
            console.print(f"{row.name}: {row.note}", highlight=False, markup=False)
    result = tuned.result
    console.print("tokens/s: median of the blocks; ratios with a 95 % interval; memory: peak reserved by torch (on a CPU resident)\n")
    if result.ratio == 1.0:
        console.print(f"the rules' plan is the fastest found: {format_rate(result.tokens_per_s, 'tokens')} measured alone", highlight=False)
    else:
        how = "in turns" if result.paired else "one after the other"
        gain = f"{result.ratio:.3f}x [{result.low:.3f}, {result.high:.3f}] the rules' plan, {how}"
        console.print(f"[bold]{gain}[/bold]: {format_rate(result.tokens_per_s, 'tokens')}", highlight=False)
    for name in PLANNED:
        if (why := tuned.plan.why[name]).source == "measurement":
            console.print(f"  {name} {getattr(tuned.plan, name)}: {why.reason}", highlight=False, markup=False)
    if result.untried:
        console.print(f"no time left for: {', '.join(result.untried)}; the same command with more --minutes goes on", highlight=False)
    console.print(f"{result.trials} trials in {format_duration(result.elapsed_s)}; kept in {folder}", highlight=False)
