"""List the shipped recipes, or print one in full."""

import argparse
from dataclasses import asdict

HELP = "list the shipped recipes, or print one"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    command.add_argument("recipe", nargs="?", help="print this recipe with every default filled in")
    command.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override a value"
    )
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from redline.cli.options import print_json
    from redline.config.load import load_recipe, shipped, to_toml
    from redline.plan.arithmetic import parameters
    from redline.record.units import format_count

    if options.recipe is not None:
        recipe = load_recipe(options.recipe, options.set)
        if options.json:
            print_json({**asdict(recipe), "fingerprint": recipe.fingerprint})
        else:
            print(f"# fingerprint {recipe.fingerprint}\n{to_toml(recipe)}", end="")
        return
    recipes = {name: load_recipe(name) for name in shipped()}
    sizes = {name: parameters(r.model).total if r.model.is_shaped else None for name, r in recipes.items()}
    if options.json:
        rows = recipes.items()
        print_json(
            [{"name": n, "workload": r.workload, "about": r.about, "parameters": sizes[n]} for n, r in rows]
        )
        return
    from redline.report.grid import show

    shown = [(name, r.workload, format_count(sizes[name]), r.about) for name, r in recipes.items()]
    show(("recipe", "workload", "size", "about"), shown, right=(2,))
