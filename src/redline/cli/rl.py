"""Reinforcement learning from verifiable rewards: the model answers, scorers say how well, and its weights follow.

redline rl run rl/demo                               GRPO on the shipped model, half a minute on a CPU

If the run is stopped or killed, run the same command again and it resumes; Ctrl-C stops it with a checkpoint. The result
is RUN/adapter (RUN/model where all weights learn).
"""

import argparse

from redline.cli.arguments import JSON, RECIPE
from redline.cli.options import print_json, recipe_of
from redline.cli.plan import chosen
from redline.cli.tables import print_plan
from redline.cli.train import RUN, check_options, train
from redline.config.recipe import Recipe
from redline.errors import ConfigError
from redline.plan.plan import to_json
from redline.tasks.registry import load_task

ARGUMENTS = {
    "run": f"""train a recipe of workload rl, or resume its run
{RECIPE}
{RUN}
--dry-run   show the plan and run nothing
{JSON}"""
}


def run(options: argparse.Namespace) -> int:
    check_options(options)
    recipe = recipe_of(options, check=_check)
    if not options.dry_run:
        return train(options, recipe)
    plan = chosen(options, recipe, options.nproc, say=lambda text: None)
    if options.json:
        print_json(to_json(plan))
    else:
        print_plan(plan, recipe)
    return 0


def _check(recipe: Recipe) -> None:
    """What can be refused before torch is imported."""
    if recipe.workload != "rl" or recipe.rl is None:
        raise ConfigError(f"{recipe.name} is a recipe of workload {recipe.workload}: give one of workload rl")
    for task, name in zip(recipe.rl.domains, recipe.rl.names, strict=True):
        load_task(task, recipe.rl.data_of(name))
