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
    from redline.config.rft import load_rft
    from redline.plan.arithmetic import parameters
    from redline.record.units import format_count

    if options.recipe is not None and options.recipe in shipped("rft"):
        rft = load_rft(options.recipe, options.set)
        print_json(asdict(rft)) if options.json else print(to_toml(rft), end="")
        return
    if options.recipe is not None:
        recipe = load_recipe(options.recipe, options.set)
        if options.json:
            print_json({**asdict(recipe), "fingerprint": recipe.fingerprint})
        else:
            print(f"# fingerprint {recipe.fingerprint}\n{to_toml(recipe)}", end="")
        return
    sizes = {name: (parameters(r.model).total, r.about) for name in shipped() for r in [load_recipe(name)]}
    tuned = {name: load_rft(name).about for name in shipped("rft")}
    if options.json:
        print_json(
            [
                *(
                    {"name": name, "workload": "pretrain", "about": about, "parameters": size}
                    for name, (size, about) in sizes.items()
                ),
                *(
                    {"name": name, "workload": "rft", "about": about, "parameters": None}
                    for name, about in tuned.items()
                ),
            ]
        )
        return
    width = max(map(len, [*sizes, *tuned]))
    for name, (size, about) in sizes.items():
        print(f"{name:<{width}}  {format_count(size):>7} parameters  {about}")
    for name, about in tuned.items():
        print(f"{name:<{width}}  {'redline rft':>18}  {about}")
