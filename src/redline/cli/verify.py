"""Prove on this machine that what the plan says is really on, and that loss and gradients agree with the fp32
reference. Of an RFT recipe: what its fine-tuning update and its generation promise.

redline verify gpt2-124m                     the plan that `redline train` would make
redline verify gpt2-124m --plan auto         the one that `redline tune` found
redline verify gpt2-124m --plan plan.json    a saved one, with the same --set values
redline verify rft/demo                      an RFT recipe: packed update, adapters, kernels, the engine's
                                             log-probabilities

A few updates are run and profiled, nothing is written. Exit code 1 when a check fails.
"""

import argparse

HELP = "prove that what a plan says is really on"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json, add_recipe

    add_recipe(command)
    command.add_argument(
        "--plan",
        metavar="FILE|auto",
        help=(
            "a plan written by `redline plan --save`; auto: the one that `redline tune` found here, else plan"
            " now (default: plan now)"
        ),
    )
    add_json(command)


def run(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from redline.cli.options import print_json, recipe_of, status, tokenise
    from redline.cli.plan import chosen

    recipe = recipe_of(options)
    plan = chosen(options, recipe, 1, say=status)
    tokenise(recipe)
    from redline.train.execution import set_allocator

    set_allocator(plan)
    from redline.tune.verify import verify

    checks = verify(recipe, plan, progress=status)
    failed, blind = (
        [check for check in checks if check.status == status] for status in ("failed", "not checked")
    )
    if options.json:
        print_json([asdict(check) for check in checks])
    else:
        more = f", {len(blind)} not checked" if blind else ""
        said = f"{len(failed)} of {len(checks)} checks failed{more}"
        _print(checks, f"{recipe.name} on {plan.hardware.title}: {said}")
    return 1 if failed else 0


def _print(checks, title: str) -> None:  # type: ignore[no-untyped-def]
    from rich.text import Text

    from redline.report.grid import show

    colours = {"passed": "green", "failed": "bold red", "not applicable": "dim", "not checked": "yellow"}
    rows = [(c.name, Text(c.status, style=colours[c.status]), c.evidence) for c in checks]
    show(("check", "", "what was seen"), rows, title=title)
