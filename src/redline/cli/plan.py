"""Show how a recipe would be executed: every value with its reason and source, predicted memory and speed.
Needs no GPU and no torch.

redline plan gpt2-124m --as a100-40g        for a GPU that is not here; of one that the table lacks the figures:
            --as "memory=24GB,bf16=165,bandwidth=1008GB/s" (dense TFLOP/s; also fp16, tf32, fp32, fp8)
redline plan gpt2-124m --save plan.json     then: redline train gpt2-124m --plan plan.json, with the same
                                            --set values

The environment is honoured and shown: A100_BATCH_SIZE and A100_GRAD_ACCUM set micro-batch and accumulation
(their product must keep the recipe's batch).
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

HELP = "how a recipe would be executed, and why"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json, add_recipe
    from redline.machine.specs import SPECS

    add_recipe(command)
    command.add_argument(
        "--as", dest="as_gpu", metavar="GPU", help=f"plan for this GPU: {', '.join(SPECS)}, or its figures"
    )
    command.add_argument("--nproc", type=int, default=1, metavar="N", help="processes, one a GPU (default 1)")
    command.add_argument(
        "--profile",
        metavar="NAME",
        help="upper bounds of a named profile: a100-80g, a100-40g, v100-32g, conservative",
    )
    command.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON")
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from redline.cli.options import print_json, recipe_of, status
    from redline.plan.plan import save, to_json

    recipe = recipe_of(options)
    plan = make(options, recipe, nproc=options.nproc)
    if options.save:
        save(plan, options.save)
        status(f"plan written to {options.save}")
    if options.json:
        print_json(to_json(plan))
        return
    from redline.cli.tables import print_plan

    print_plan(plan, recipe)


def outside_of(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """What bounds the plan from outside the recipe: the environment, a profile, what the user typed."""
    from redline.cli.options import typed_pins
    from redline.plan.bounds import Outside
    from redline.plan.profiles import find_profile

    profile = getattr(options, "profile", None)
    return Outside(
        environment=os.environ, profile=find_profile(profile) if profile else None, typed=typed_pins(options)
    )


def make(options: argparse.Namespace, recipe, *, nproc: int):  # type: ignore[no-untyped-def]
    """The plan for this machine, or for the one named."""
    from dataclasses import replace

    from redline.cli.options import status
    from redline.errors import MachineError
    from redline.machine.facts import read_facts
    from redline.machine.store import cached
    from redline.plan.hardware import hardware_as, hardware_here
    from redline.plan.planner import make_plan

    facts, as_gpu, device = read_facts(), getattr(options, "as_gpu", None), getattr(options, "device", None)
    if device == "cuda" and not facts.gpus:
        raise MachineError("--device cuda: this machine shows no GPU; use --device cpu, or check the driver")
    if as_gpu:
        hardware = hardware_as(as_gpu, facts.cpu_cores)
    else:
        here = replace(facts, gpus=()) if device == "cpu" else facts
        hardware = hardware_here(here, cached(facts, progress=status))
    return make_plan(recipe, hardware, world_size=nproc, outside=outside_of(options))


def chosen(options: argparse.Namespace, recipe, world_size: int, *, say: Callable[[str], None]):  # type: ignore[no-untyped-def]
    """The plan that --plan names: a file, `auto`, or without it the one that is made now."""
    from redline.cli.options import typed_pins
    from redline.plan.plan import load_for

    if options.plan not in (None, "auto"):
        return load_for(Path(options.plan), recipe, world_size, typed=typed_pins(options))
    plan = make(options, recipe, nproc=world_size)
    return plan if options.plan is None else _tuned(options, recipe, plan, say)


def _tuned(options: argparse.Namespace, recipe, plan, say: Callable[[str], None]):  # type: ignore[no-untyped-def]
    """The plan that tuning found for what this plan of the rules is for, or that one itself; says which."""
    from redline.machine.facts import read_facts
    from redline.record.units import format_rate
    from redline.tune.store import tuned_plan, tuning_folder

    folder = tuning_folder(read_facts(), plan)
    if plan.world_size > 1:
        say(f"--plan auto: tuning works on one process and this run has {plan.world_size}; the rules' plan")
        return plan
    if (found := tuned_plan(folder, recipe)) is None:
        say(
            "--plan auto: this recipe with these pins was not tuned on this machine (redline tune"
            f" {options.recipe}); the rules' plan"
        )
        return plan
    tuned, result = found
    say(
        f"--plan auto: tuned {result.tuned_at}, {result.ratio:.2f}x {result.against},"
        f" {format_rate(result.tokens_per_s, 'tokens')} in its trials ({folder / 'plan.json'})"
    )
    return tuned
