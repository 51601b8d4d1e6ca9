"""Kernel attention, orthogonality and direct feedback alignment against what they replace (docs/okadfa.md).

redline okadfa ablate okadfa/nano                           three seeds and three learning rates per arm
redline okadfa ablate okadfa/fast --seeds 1 --lrs 1e-4,3e-4,1e-3 --set train.steps=600 --set data.source=data/wiki

If it is killed, run the same command again: finished runs are kept. `redline report FOLDER/A5/*/` draws them.
"""

import argparse
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

from redline.cli.options import name_of, print_json, recipe_of, status, tokenise
from redline.errors import ConfigError
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_here
from redline.record.units import counted
from redline.report.grid import show
from redline.tune.okadfa import COLUMNS, RESULT, cells, study
from redline.tune.race import train_in_process

ARGUMENTS = {
    "ablate": """the arms A0 to A7: softmax or kernel attention, orthogonality, the learning rule
@RECIPE
--arms NAME,NAME   only these (default: all)
--seeds N          runs of each arm at its best learning rate (default 3)
--lrs LR,LR        learning rates that each arm tries (default: 1e-3,3e-3,1e-2)
--out DIR          the folder (default: runs/RECIPE-ablation)
@JSON
"""
}


def run(options: argparse.Namespace) -> None:
    try:
        lrs = [float(text) for text in (options.lrs or "1e-3,3e-3,1e-2").split(",")]
    except ValueError as error:
        raise ConfigError(f"--lrs takes numbers separated by commas, got {options.lrs!r}") from error
    if not all(0 < lr < math.inf for lr in lrs):
        raise ConfigError(f"--lrs must be finite and above 0, got {options.lrs!r}")
    recipe, facts = recipe_of(options), read_facts()
    name = name_of(options, recipe)
    folder = options.out or Path("runs") / f"{name.replace('/', '-')}-ablation"
    folder.mkdir(parents=True, exist_ok=True)
    hardware = hardware_here(facts, None).title
    tokenise(recipe)
    rows = study(
        recipe, hardware, folder, arms=[name for name in (options.arms or "").split(",") if name],
        seeds=options.seeds, lrs=lrs, train=partial(train_in_process, progress=status), progress=status,
    )  # fmt: skip
    if options.json:
        print_json([asdict(row) for row in rows])
        return
    title = f"{name} on {hardware}: {counted(options.seeds, 'seed')}, {counted(len(lrs), 'learning rate')} per arm"
    show(COLUMNS, [cells(row) for row in rows], title=title, right=range(2, len(COLUMNS)))
    print(f"written to {folder / RESULT}")
