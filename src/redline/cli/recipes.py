"""List the shipped recipes, or print one in full."""

import argparse
from dataclasses import asdict

from redline.cli.options import answer, print_json
from redline.config.load import load_recipe, shipped, to_toml
from redline.plan.arithmetic import parameters
from redline.record.units import format_count
from redline.report.grid import show

ARGUMENTS = """
[RECIPE]                   print this recipe with every default filled in
--set TABLE.KEY=VALUE...   override a value
@JSON
"""


def run(options: argparse.Namespace) -> None:
    if options.recipe is not None:
        recipe = load_recipe(options.recipe, options.set)
        text = f"# fingerprint {recipe.fingerprint}\n{to_toml(recipe)}"
        answer(options, asdict(recipe) | {"fingerprint": recipe.fingerprint}, lambda: print(text, end=""))
        return
    recipes = {name: load_recipe(name) for name in shipped()}
    sizes = {name: parameters(r.model).total if r.model.is_shaped else None for name, r in recipes.items()}
    if options.json:
        rows = ((name, r.workload, r.about, sizes[name]) for name, r in recipes.items())
        print_json([dict(zip(("name", "workload", "about", "parameters"), row, strict=True)) for row in rows])
        return
    shown = [(name, r.workload, format_count(sizes[name]), r.about) for name, r in recipes.items()]
    show(("recipe", "workload", "size", "about"), shown, right=(2,))
