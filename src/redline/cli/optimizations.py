"""The catalogue of optimisations: what is claimed for each and by whom, what it does to numbers, and whether
it applies. Needs no torch.

redline optimizations                             every entry
redline optimizations gpt2-124m --as a100-40g     which of them apply to a recipe on a GPU, and if not why not
redline optimizations train.log                   which of them fix what `redline diagnose` finds in a log

`redline ablate RECIPE` measures them.
"""

import argparse
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from redline.cli.options import answer, print_json, recipe_of
from redline.config.recipe import Recipe
from redline.diagnose.answer import verdict
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.errors import ConfigError
from redline.machine.facts import read_facts
from redline.optimizations.catalogue import Optimization, catalogue, ratio, study, switched
from redline.plan.hardware import hardware_as, hardware_here
from redline.plan.plan import Hardware
from redline.report.grid import Output, show

ARGUMENTS = """
[RECIPE]                   say whether each applies to this recipe and machine, or to this log
--set TABLE.KEY=VALUE...   override a value of the recipe
--as GPU                   for this GPU instead of the machine's own; needs a recipe
@JSON
"""
Row = dict[str, Any]


def run(options: argparse.Namespace) -> None:
    name = options.recipe
    if name is None and (options.as_ or options.set):
        raise ConfigError("--as and --set need a recipe: redline optimizations RECIPE --as GPU")
    if name is not None and Path(name).exists() and not name.endswith(".toml"):
        _of_a_log(options)
        return
    rows, where = [_row(entry) for entry in catalogue().values()], ""
    if name is not None:
        facts, recipe = read_facts(), recipe_of(options)
        hardware = hardware_as(options.as_, facts.cpu_cores) if options.as_ else hardware_here(facts, None)
        where = f"{name} on {hardware.title}"
        for row, entry in zip(rows, catalogue().values(), strict=True):
            why_not = _why_not(entry, recipe, name, hardware)
            row |= {"applies": why_not is None, "why_not": why_not}
    answer(options, rows, lambda: _print(rows, where))


def _row(entry: Optimization) -> Row:
    names = ("family", "name", "title", "workloads", "effect", "standing", "claimed", "note")
    claims = [asdict(claim) for claim in entry.claims]
    return {name: getattr(entry, name) for name in names} | {"switch": switched(entry), "claims": claims}


def _of_a_log(options: argparse.Namespace) -> None:
    """Print the entries that fix what a log shows, with their predicted gain."""
    if options.as_ or options.set:
        raise ConfigError("--as and --set are for a recipe: a log has its own GPU and settings")
    observed = read(Path(options.recipe))
    findings = diagnose(observed)
    rows = [
        _row(catalogue()[found.optimisation])
        | {"applies": True, "cause": found.cause, "gain": str(found.gain or "no speed"), "fix": found.fix}
        for found in findings
        if found.optimisation
    ]
    if options.json:
        print_json(rows)
        return
    console = Output(markup=False)
    for row in rows:
        console.print(f"{row['name']}: {row['title']}", style="bold")
        console.print(f"  {row['gain']}; claimed {ratio(row['claimed'])} by {_by(row)}")
        console.print(f"  found: {row['cause']}. Fix: {row['fix']}")
    if not rows:
        console.print(f"No entry fixes anything that was found. {verdict(observed, findings).text}".strip())


def _why_not(entry: Optimization, recipe: Recipe, name: str, hardware: Hardware) -> str | None:
    """Why an entry does not apply: its nature, the recipe's study, the recipe's shapes, or the machine."""
    if entry.standing == "refuted":
        return "the claim cannot hold"
    if entry.standing == "thrown out":
        return "built, measured and thrown out"
    if entry.standing == "recipe":
        return "changes the training: set it in the recipe"
    workloads = {part.workload for part in study(name, recipe.workload)}
    if not workloads & set(entry.workloads):
        studied = " and ".join(sorted(workloads))
        return f"for {' and '.join(entry.workloads)}; this recipe's study covers {studied}"
    return entry.why_not(recipe, hardware)


def _print(rows: list[Row], where: str) -> None:
    if where:
        print(where)
    columns = ("name", "claimed", "numbers", "applies" if where else "switch", "by", "why")
    for family, own in groupby(rows, key=lambda row: row["family"]):
        show(columns, [_cells(row) for row in own], title=f"\n{family}")
    print("\nclaimed: speed with the change over speed without it, as the source states it;")
    print("nothing here was measured")
    print("notes: docs/optimizations.md, or --json")


def _cells(row: Row) -> tuple[str, ...]:
    standing, last = row["standing"], row["switch"]
    why = row["note"] if standing in ("thrown out", "refuted") else ""
    if "applies" in row:
        last = "yes" if standing == "switch" else standing
        if not row["applies"] and standing in ("switch", "built in"):
            last, why = "no", row["why_not"]
    return row["name"], ratio(row["claimed"]), row["effect"], last, f"by {_by(row)}", why


def _by(row: Row) -> str:
    return "; ".join(claim["source"] for claim in row["claims"])
