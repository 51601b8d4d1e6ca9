"""Pre-train a recipe. The same command goes on with a run that was stopped or killed; Ctrl-C stops it with a
checkpoint.

redline train nano
redline train gpt2-124m --set data.source=data/wiki --run runs/wiki --nproc 2
torchrun --nproc-per-node 2 --no-python -- redline train gpt2-124m     the `--` keeps torchrun from reading
                                                                       our options
"""

import argparse
import os
from pathlib import Path

HELP = "pre-train a recipe, or go on with its run"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json, add_recipe

    add_recipe(command)
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
    add_json(command)


def run(options: argparse.Namespace) -> int:
    from redline.cli.options import recipe_of
    from redline.launch import under_torchrun
    from redline.record.export import check_names

    if options.nproc < 1:
        from redline.errors import ConfigError

        raise ConfigError(f"--nproc must be at least 1, got {options.nproc}")
    check_names(options.export)
    recipe = recipe_of(options)
    folder = options.run or Path("runs") / recipe.name
    if options.nproc > 1 and not under_torchrun():
        return _launch(options, recipe, folder)
    return _train(options, recipe, folder)


def _launch(options: argparse.Namespace, recipe, folder: Path) -> int:  # type: ignore[no-untyped-def]
    """Start the processes, with ceilings measured beforehand so that all of them plan alike."""
    from redline.launch import failure, out_of_memory_override, torchrun, with_recovery

    _plan(options, recipe, options.nproc)
    events = folder / "events.jsonl"
    code = with_recovery(
        lambda overrides: torchrun(options.nproc, [*options.arguments, *overrides]),
        lambda: out_of_memory_override(events),
    )
    if code != 0 and (failed := failure(events)) is not None:
        raise failed  # once more, below what torchrun printed
    return code


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

        status("measuring this machine's ceilings, once")
        set_allocator(make(options, recipe, nproc=world_size))
        load_or_measure(facts, progress=status)
    first = os.environ.get("RANK", "0") == "0" and not (options.nproc > 1 and not under_torchrun())
    return chosen(options, recipe, world_size, say=status if first else lambda text: None)


def _train(options: argparse.Namespace, recipe, folder: Path) -> int:  # type: ignore[no-untyped-def]
    from redline.cli.options import byte_progress, print_json, status
    from redline.cli.view import describe, observers_for, print_outcome

    plan = _plan(options, recipe, int(os.environ.get("WORLD_SIZE", 1)))
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
        outcome = pretrain(
            recipe,
            plan,
            folder,
            process,
            observers=lambda resume_step: observers_for(options, recipe, plan, folder, resume_step),
            progress=byte_progress("tokenising") if process.is_first else None,
        )
    if process.is_first:
        share = read_run(folder).typical("ceiling_share")
        forget_if_beaten(read_facts(), share.value if share else 0.0, status)
    if process.is_first and options.json:
        print_json({"run": str(folder), "step": outcome.step, "why": outcome.why, "metrics": outcome.metrics})
    elif process.is_first:
        print_outcome(outcome.why, outcome.step, folder)
    return 0
