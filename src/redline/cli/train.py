"""Train a recipe: pre-training, or fine-tuning (`redline finetune` is the short way). If the run is stopped or
killed, run the same command again and it resumes; Ctrl-C stops it with a checkpoint. More steps or hours extend a
finished run.

redline train nano
redline train gpt2-124m --set data.source=data/wiki --run runs/wiki --nproc 2
redline train nano --fork runs/nano --run runs/rescued --set train.lr=1e-3
torchrun --nproc-per-node 2 --no-python -- redline train gpt2-124m     `--` keeps torchrun from reading our options
"""

import argparse
import os
from functools import partial
from pathlib import Path

from redline.cli.arguments import JSON, PLAN, PREFER, RECIPE
from redline.cli.options import answer, byte_progress, check_least, recipe_of, status
from redline.cli.plan import chosen, make
from redline.cli.view import describe, observers_for, print_outcome
from redline.config.recipe import Recipe
from redline.data.read import find_source
from redline.errors import ConfigError
from redline.launch import LAUNCHER, out_of_memory_override, start_processes, under_torchrun, with_recovery
from redline.machine.facts import read_facts
from redline.machine.store import cached, forget_if_beaten
from redline.plan.plan import Plan
from redline.record.export import check_names
from redline.record.read import read_run
from redline.record.run import RunFolder
from redline.train.open_run import changes
from redline.train.places import resolve

RUN = f"""
--run DIR          the run folder (default: runs/RECIPE)
{PLAN}
{PREFER}
--fork RUN         start from the last checkpoint of this run (or from this checkpoint), under other values; needs --run
--nproc N          processes on this machine, one a GPU (default 1)
--export NAME...   also send metrics to tensorboard, wandb or mlflow
--quiet            no live view
"""
ARGUMENTS = f"""
{RECIPE}
--steps N   updates of the run, as --set train.steps=N: 100 for a smoke test, into which the warm-up is made to fit
{RUN}
{JSON}
"""


def run(options: argparse.Namespace) -> int:
    check_options(options)
    check_least("--steps", options.steps)
    recipe = recipe_of(options, *([f"train.steps={options.steps}"] if options.steps else []))
    if recipe.workload in ("rft", "rl"):
        verb = f"redline {recipe.workload} run {options.recipe}"
        raise ConfigError(f"{options.recipe} is a recipe of workload {recipe.workload}: use `{verb}`")
    return train(options, recipe)


def check_options(options: argparse.Namespace) -> None:
    """What can be refused before torch is imported."""
    check_least("--nproc", options.nproc)
    check_names(options.export)
    if options.fork is not None and options.run is None:
        raise ConfigError("--fork begins a new run: name its folder with --run")
    if options.fork is not None:
        resolve(options.fork)


def train(options: argparse.Namespace, recipe: Recipe) -> int:
    """Train the recipe here, or on several processes."""
    if LAUNCHER in os.environ:
        from redline.measure.lifeline import end_with

        end_with(int(os.environ[LAUNCHER]))
    folder = options.run or Path("runs") / recipe.name
    changes(RunFolder(folder), recipe)
    if recipe.workload == "pretrain":
        find_source(recipe.data.source)
    if options.nproc == 1 or under_torchrun():
        return _train(options, recipe, folder)
    _plan(options, recipe, options.nproc)  # measures the ceilings, so that all processes plan alike
    return with_recovery(
        lambda overrides: start_processes(options.nproc, [*options.arguments, *overrides]),
        lambda: out_of_memory_override(folder / "events.jsonl"),
    )


def _plan(options: argparse.Namespace, recipe: Recipe, world_size: int) -> Plan:
    """The plan, made with measured ceilings; on a new machine they are measured first."""
    facts, from_file = read_facts(), options.plan not in (None, "auto")
    if not from_file and not under_torchrun() and cached(facts) is None:
        from redline.machine.ceilings import load_or_measure
        from redline.train.execution import set_allocator

        status("measuring this machine's ceilings")
        set_allocator(make(options, recipe, nproc=world_size))
        load_or_measure(facts, progress=status)
    first = os.environ.get("RANK", "0") == "0" and not (options.nproc > 1 and not under_torchrun())
    return chosen(options, recipe, world_size, say=status if first else lambda text: None)


def _train(options: argparse.Namespace, recipe: Recipe, folder: Path) -> int:
    plan = _plan(options, recipe, int(os.environ.get("WORLD_SIZE", 1)))
    from redline.finetune import finetune
    from redline.pretrain import pretrain
    from redline.rl.run import reinforce
    from redline.train.execution import set_allocator
    from redline.train.process import join

    set_allocator(plan)
    with join(plan.hardware.kind) as process:
        if process.is_first:
            status(describe(recipe, plan, folder))
        watching = partial(observers_for, options, recipe, plan, folder)
        if recipe.workload != "pretrain":
            run = finetune if recipe.workload == "finetune" else reinforce
            outcome = run(recipe, plan, folder, process, observers=watching, fork=options.fork)
        else:
            progress = byte_progress("tokenising") if process.is_first else None
            outcome = pretrain(
                recipe, plan, folder, process, observers=watching, progress=progress, fork=options.fork
            )
    if not process.is_first:
        return 0
    share = read_run(folder).typical("ceiling_share")
    forget_if_beaten(read_facts(), share.value if share else 0.0, status)
    answer(
        options,
        {"run": str(folder), "step": outcome.step, "why": outcome.why, "metrics": outcome.metrics},
        lambda: print_outcome(outcome.why, outcome.step, folder),
    )
    return 0
