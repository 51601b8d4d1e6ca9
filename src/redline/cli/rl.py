"""Reinforcement learning from verifiable rewards: the model answers, scorers say how well, and its weights follow.

redline rl run rl/demo                               GRPO on the shipped model, half a minute on a CPU
redline rl run rl/guru-8gpu --nproc 8 --dry-run      the plan for eight processes, and nothing else
redline rl doctor rl/demo                            before training: solve rates, formats, lengths, times, advice
redline rl compare runs/baseline runs/pcgrad         accuracy of every domain with intervals, conflicts, cost

If the run is stopped or killed, run the same command again and it resumes; Ctrl-C stops it with a checkpoint. The result
is RUN/adapter (RUN/model where all weights learn).
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from redline.cli.arguments import DEVICE, JSON, PLAN, RECIPE
from redline.cli.options import answer, check_least, recipe_of, status
from redline.cli.plan import chosen
from redline.cli.rl_tables import print_compared, print_doctor
from redline.cli.tables import print_plan
from redline.cli.train import RUN, check_options, train
from redline.config.recipe import Recipe
from redline.errors import ConfigError
from redline.plan.plan import to_json
from redline.plan.planner import MEMORY_SHARE
from redline.plan.reinforcement import pcgrad_place
from redline.record.read import read_runs
from redline.report.page import write_page
from redline.report.reinforcement import compared
from redline.report.view import view
from redline.tasks.registry import load_task

ARGUMENTS = {
    "run": f"""train a recipe of workload rl, or resume its run
{RECIPE}
{RUN}
--dry-run   show the plan and run nothing
{JSON}""",
    "doctor": f"""draw a few answers of every domain and say what to change before training
{RECIPE}
--questions N   questions of every domain (default 8)
{DEVICE}
{PLAN}
{JSON}""",
    "compare": f"""two runs side by side, with a verdict
BASELINE     the run to compare with
OTHER        the run to judge, say one with PCGrad
--out FILE   also write both runs as one page
{JSON}""",
}


def run(options: argparse.Namespace) -> int:
    return {"run": _run, "doctor": _doctor, "compare": _compare}[options.verb](options)


def _run(options: argparse.Namespace) -> int:
    check_options(options)
    recipe = recipe_of(options, check=_check)
    if not options.dry_run:
        return train(options, recipe)
    plan = chosen(options, recipe, options.nproc, say=lambda text: None)
    place, why = pcgrad_place(recipe, plan, MEMORY_SHARE)
    kept = {"pcgrad_kept_on": {"value": place, "reason": why, "source": "rule"}}
    watched = recipe.rl is not None and recipe.rl.pcgrad != "off"

    def show() -> None:
        print_plan(plan, recipe)
        if watched:
            print(f"PCGrad keeps the domains' gradients on the {place}: {why}")

    answer(options, to_json(plan) | (kept if watched else {}), show)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    check_least("--questions", options.questions)
    recipe = recipe_of(options, check=_check)
    plan = chosen(options, recipe, 1, say=status)
    from redline.rl.doctor import examine
    from redline.train.execution import set_allocator
    from redline.train.process import join

    set_allocator(plan)
    with join(plan.hardware.kind) as process:
        report = examine(recipe, plan, process, questions=options.questions)
    answer(options, asdict(report), lambda: print_doctor(report))
    return 0


def _compare(options: argparse.Namespace) -> int:
    base, other = read_runs([Path(options.baseline), Path(options.other)])
    found = compared(base, other)
    if options.out:
        write_page([view(base, 0), view(other, 1)], options.out)
        status(f"page: {options.out}")
    answer(options, asdict(found), lambda: print_compared(found, (base.label, other.label)))
    return 0


def _check(recipe: Recipe) -> None:
    """What can be refused before torch is imported."""
    if recipe.workload != "rl" or recipe.rl is None:
        raise ConfigError(f"{recipe.name} is a recipe of workload {recipe.workload}: give one of workload rl")
    for task, name in zip(recipe.rl.domains, recipe.rl.names, strict=True):
        load_task(task, recipe.rl.data_of(name))
