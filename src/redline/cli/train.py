"""Train a recipe: pre-training, or fine-tuning (`redline finetune` is the short way). If the run is stopped or
killed, run the same command again and it resumes; Ctrl-C stops it with a checkpoint. More steps or hours extend a
finished run.

redline train nano
redline train gpt2-124m --set data.source=data/wiki --run runs/wiki --nproc 2
redline train nano --fork runs/nano --run runs/rescued --set train.lr=1e-3
torchrun --nproc-per-node 2 --no-python -- redline train gpt2-124m     the `--` keeps torchrun from reading
                                                                       our options
"""

import argparse
import os
from functools import partial
from pathlib import Path

HELP = "train a recipe, or resume, extend or fork its run"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json, add_recipe

    add_recipe(command)
    add_run_options(command)
    add_json(command)


def add_run_options(command: argparse.ArgumentParser) -> None:
    """What every training takes."""
    command.add_argument("--run", type=Path, metavar="DIR", help="the run folder (default runs/RECIPE)")
    command.add_argument(
        "--plan",
        metavar="FILE|auto",
        help=(
            "a plan written by `redline plan --save`; auto: the one that `redline tune` found here, else plan"
            " now (default: plan now)"
        ),
    )
    command.add_argument(
        "--fork",
        type=Path,
        metavar="RUN",
        help="begin with the last checkpoint of this run (or with this checkpoint), under other values; needs --run",
    )
    command.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="processes on this machine, one a GPU (default 1)"
    )
    command.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME",
        help="also send metrics to: tensorboard, wandb, mlflow",
    )
    command.add_argument("--quiet", action="store_true", help="no live view")


def run(options: argparse.Namespace) -> int:
    from redline.cli.options import recipe_of
    from redline.errors import ConfigError

    check_options(options)
    recipe = recipe_of(options)
    if recipe.workload == "rft":
        raise ConfigError(f"{options.recipe} is an RFT recipe: use `redline rft run {options.recipe}`")
    return train(options, recipe)


def check_options(options: argparse.Namespace) -> None:
    """What can be said before torch is imported."""
    from redline.cli.options import check_least
    from redline.errors import ConfigError
    from redline.record.export import check_names
    from redline.train.places import resolve

    check_least("--nproc", options.nproc)
    check_names(options.export)
    if options.fork is not None and options.run is None:
        raise ConfigError("--fork begins a new run: name its folder with --run")
    if options.fork is not None:
        resolve(options.fork)


def train(options: argparse.Namespace, recipe) -> int:  # type: ignore[no-untyped-def]
    """Train the recipe here, or on several processes."""
    from redline.data.read import find_source
    from redline.launch import LAUNCHER, under_torchrun
    from redline.record.run import RunFolder
    from redline.train.open_run import changes

    if LAUNCHER in os.environ:
        from redline.measure.lifeline import end_with

        end_with(int(os.environ[LAUNCHER]))
    folder = options.run or Path("runs") / recipe.name
    changes(RunFolder(folder), recipe)
    if recipe.workload == "pretrain":
        find_source(recipe.data.source)
    if options.nproc > 1 and not under_torchrun():
        return _launch(options, recipe, folder)
    return _train(options, recipe, folder)


def _launch(options: argparse.Namespace, recipe, folder: Path) -> int:  # type: ignore[no-untyped-def]
    """Start the processes, with ceilings measured beforehand so that all of them plan alike."""
    from redline.launch import out_of_memory_override, start_processes, with_recovery

    _plan(options, recipe, options.nproc)
    events = folder / "events.jsonl"
    return with_recovery(
        lambda overrides: start_processes(options.nproc, [*options.arguments, *overrides]),
        lambda: out_of_memory_override(events),
    )


def _plan(options: argparse.Namespace, recipe, world_size: int):  # type: ignore[no-untyped-def]
    """The plan, made with measured ceilings; on a new machine they are measured first."""
    from redline.cli.options import status
    from redline.cli.plan import chosen, make
    from redline.launch import under_torchrun
    from redline.machine.facts import read_facts
    from redline.machine.store import cached

    facts, from_file = read_facts(), options.plan not in (None, "auto")
    if not from_file and not under_torchrun() and cached(facts) is None:
        from redline.machine.ceilings import load_or_measure
        from redline.train.execution import set_allocator

        status("measuring this machine's ceilings")
        set_allocator(make(options, recipe, nproc=world_size))
        load_or_measure(facts, progress=status)
    first = os.environ.get("RANK", "0") == "0" and not (options.nproc > 1 and not under_torchrun())
    return chosen(options, recipe, world_size, say=status if first else lambda text: None)


def _train(options: argparse.Namespace, recipe, folder: Path) -> int:  # type: ignore[no-untyped-def]
    from redline.cli.options import byte_progress, print_json, status
    from redline.cli.view import describe, observers_for, print_outcome

    plan = _plan(options, recipe, int(os.environ.get("WORLD_SIZE", 1)))
    from redline.finetune import finetune
    from redline.machine.facts import read_facts
    from redline.machine.store import forget_if_beaten
    from redline.pretrain import pretrain
    from redline.record.read import read_run
    from redline.train.execution import set_allocator
    from redline.train.process import join

    set_allocator(plan)
    with join(plan.hardware.kind) as process:
        if process.is_first:
            status(describe(recipe, plan, folder))
        watching = partial(observers_for, options, recipe, plan, folder)
        if recipe.workload == "finetune":
            outcome = finetune(recipe, plan, folder, process, observers=watching, fork=options.fork)
        else:
            progress = byte_progress("tokenising") if process.is_first else None
            outcome = pretrain(
                recipe, plan, folder, process, observers=watching, progress=progress, fork=options.fork
            )
    if process.is_first:
        share = read_run(folder).typical("ceiling_share")
        forget_if_beaten(read_facts(), share.value if share else 0.0, status)
    if process.is_first and options.json:
        print_json({"run": str(folder), "step": outcome.step, "why": outcome.why, "metrics": outcome.metrics})
    elif process.is_first:
        print_outcome(outcome.why, outcome.step, folder)
    return 0
