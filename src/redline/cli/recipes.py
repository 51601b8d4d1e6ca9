"""List the shipped recipes, or print one in full."""

import argparse
from dataclasses import asdict

HELP = "list the shipped recipes, or print one"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    command.add_argument("recipe", nargs="?", help="print this recipe with every default filled in")
    command.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override a value")
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
    recipes = [load_recipe(name) for name in shipped()]
    names = list(shipped())
    if options.json:
        print_json(
            [{"name": name, "about": r.about, "parameters": parameters(r.model).total} for name, r in zip(names, recipes, strict=True)]
        )
        return
    width = max(map(len, names))
    for name, r in zip(names, recipes, strict=True):
        print(f"{name:<{width}}  {format_count(parameters(r.model).total):>7} parameters  {r.about}")
