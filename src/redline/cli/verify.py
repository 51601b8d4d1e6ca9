"""Prove on this machine that everything the plan says is in effect, and that loss and gradients agree with the fp32
reference. For an RFT or RL recipe: that its update and its generation do what they promise.

redline verify gpt2-124m                     the plan that `redline train` would make
redline verify gpt2-124m --plan auto         the one that `redline tune` found
redline verify gpt2-124m --plan plan.json    a saved one, with the same --set values
redline verify rft/demo                      (or rl/demo) packed update, adapters, kernels, the engine's log-probabilities

A few updates are run and profiled; nothing is written. The exit code is 1 if a check fails.
"""

import argparse
from collections import Counter
from dataclasses import asdict

from rich.text import Text

from redline.cli.options import print_json, recipe_of, status, tokenise
from redline.cli.plan import chosen
from redline.record.units import counted
from redline.report.grid import show

ARGUMENTS = """
@RECIPE
@PLAN
@JSON
"""
COLOURS = {"passed": "green", "failed": "bold red", "not applicable": "dim", "not checked": "yellow"}


def run(options: argparse.Namespace) -> int:
    recipe = recipe_of(options)
    plan = chosen(options, recipe, 1, say=status)
    tokenise(recipe)
    from redline.train.execution import set_allocator

    set_allocator(plan)
    from redline.tune.verify import verify

    checks = verify(recipe, plan, progress=status)
    found = Counter(check.status for check in checks)
    if options.json:
        print_json([asdict(check) for check in checks])
    else:
        more = [f"{found[status]} {status}" for status in ("not applicable", "not checked") if found[status]]
        counts = [f"{counted(found['passed'], 'check')} passed", f"{found['failed']} failed", *more]
        title = f"{recipe.name} on {plan.hardware.title}: {', '.join(counts)}"
        rows = [(c.name, Text(c.status, style=COLOURS[c.status]), c.evidence) for c in checks]
        show(("check", "", "what was seen"), rows, title=title)
    return 1 if found["failed"] else 0
