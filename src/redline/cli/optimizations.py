"""The catalogue of optimisations: what is claimed for each and by whom, what it does to numbers, and whether it applies. Needs no torch.

redline optimizations                             every entry
redline optimizations gpt2-124m --as a100-40g     which of them apply to a recipe on a GPU, and if not why not

`redline ablate RECIPE` measures them.
"""

import argparse

HELP = "the catalogue of optimisations: claims, sources, and which apply"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    command.add_argument("recipe", nargs="?", help="say for this recipe and machine whether each applies")
    command.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override a value of the recipe")
    command.add_argument("--as", dest="as_gpu", metavar="GPU", help="for this GPU instead of the machine's own; needs a recipe")
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from redline.cli.options import print_json, recipe_of
    from redline.errors import ConfigError

    if options.recipe is None and (options.as_gpu or options.set):
        raise ConfigError("--as and --set need a recipe: redline optimizations RECIPE --as GPU")
    hardware = None if options.recipe is None else _hardware(options.as_gpu)
    rows = _rows(None if options.recipe is None else recipe_of(options), hardware)
    if options.json:
        print_json(rows)
        return
    _print(rows, "" if hardware is None else f"{options.recipe} on {hardware.title}")


def _hardware(as_gpu: str | None):  # type: ignore[no-untyped-def]
    from redline.machine.facts import read_facts
    from redline.plan.hardware import hardware_as, hardware_here

    facts = read_facts()
    return hardware_as(as_gpu, facts.cpu_cores) if as_gpu else hardware_here(facts, None)


def _rows(recipe, hardware) -> list[dict[str, object]]:  # type: ignore[no-untyped-def]
    from dataclasses import asdict

    from redline.optimizations.catalogue import FAMILIES, switched

    rows = []
    for family, entries in FAMILIES.items():
        for entry in entries:
            row: dict[str, object] = {
                "family": family,
                "name": entry.name,
                "title": entry.title,
                "workloads": entry.workloads,
                "effect": entry.effect,
                "standing": entry.standing,
                "switch": switched(entry),
                "claimed": entry.claimed,
                "claims": [asdict(claim) for claim in entry.claims],
                "note": entry.note,
            }
            if recipe is not None:
                why_not = entry.why_not(recipe, hardware) if entry.standing == "switch" else None
                row |= {"applies": entry.standing in ("switch", "built in") and why_not is None, "why_not": why_not}
            rows.append(row)
    return rows


def _print(rows: list[dict[str, object]], where: str) -> None:
    from typing import Any

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from redline.optimizations.catalogue import ratio

    console = Console()
    if where:
        console.print(f"[bold]{escape(where)}[/bold]")
    for family in dict.fromkeys(row["family"] for row in rows):
        table = Table(title=f"\n{family}", title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("name", "claimed", "by", "numbers", "applies" if where else "switch"):
            table.add_column(column, overflow="fold")
        for row in rows:
            if row["family"] == family:
                shown: dict[str, Any] = row
                last = shown["note"] if shown["standing"] == "refuted" else _applies(shown) if where else shown["switch"]
                by = "; ".join(claim["source"] for claim in shown["claims"])
                cells = (shown["name"], ratio(shown["claimed"]), by, shown["effect"], last)
                table.add_row(*(escape(str(cell)) for cell in cells))
        console.print(table)
    console.print("\nclaimed: speed with the change over speed without it, as the source has it; nothing here was measured")
    console.print("notes: docs/optimizations.md, or --json")


def _applies(row: dict[str, object]) -> str:
    if row["standing"] != "switch":
        return str(row["standing"])
    return "yes" if row["applies"] else f"no: {row['why_not']}"
