"""Train recipes on the same data and compare how soon each reaches each validation loss: seconds (with and without
start-up), tokens and joules, over several seeds (docs/time-to-loss.md).

redline race llama-124m-muon gpt2-124m --seconds 180 --set data.source=data/wiki
redline race speedrun/nano speedrun/nano@train.optimizer=adamw@train.lr=3e-3     a variant, without a file
redline race speedrun/3min --seeds 3 --against benchmarks/race.json              exits with 1 if it became slower

If it is killed, run the same command again: finished runs are kept. FOLDER/report.html draws the curves.
"""

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from redline.cli.options import ceilings_of, print_json, status, tokenise
from redline.config.load import load_recipe
from redline.errors import ConfigError, TrainingError
from redline.machine.facts import read_facts
from redline.record.units import DASH, counted
from redline.report.grid import Grid, Output
from redline.report.page import write_page
from redline.report.view import views
from redline.tune import gate, race

ARGUMENTS = """
RECIPE...                  shipped recipes or .toml files; RECIPE@TABLE.KEY=VALUE is a variant of one
--set TABLE.KEY=VALUE...   override a value of every recipe
--seeds N                  runs of each recipe (default 3)
--target NUMBER            end a run once it reaches this validation loss
--seconds SECONDS          end a run after this much training; the schedules end there too
--out DIR                  the folder (default runs/race)
--against FILE             compare with the race.json of an earlier race on this kind of machine
@JSON
"""

WIDEST_NAME = 30
"""A longer name leaves no room for the table's figures."""


def run(options: argparse.Namespace) -> int:
    sets = list(options.set)
    sets += [f"train.target_loss={options.target!r}"] if options.target else []
    sets += [f"train.max_hours={options.seconds / 3600!r}"] if options.seconds else []
    arms = [_arm(text, sets) for text in options.recipe]
    race.check(arms)
    facts, result_here = read_facts(), (options.out / race.RESULT).resolve()
    if options.against and options.against.resolve() == result_here:
        raise ConfigError(f"{options.against} is the file this race writes: give another --out")
    before = gate.recorded(options.against, arms, facts, options.seeds) if options.against else None
    for name in gate.changed(arms, before) if before else ():
        status(
            f"{name} has another fingerprint in {options.against}: the recipe, or what Redline reads from it, has"
            " changed since, so this compares the recipes too"
        )
    ceilings_of(facts)  # otherwise the first run's start-up would include measuring them
    tokens = tokenise(arms[0].recipe)
    if before:
        gate.check_tokens(tokens, before)
    result = race.race(
        arms,
        options.out,
        facts,
        seeds=options.seeds,
        train=partial(race.train_in_process, progress=status),
        progress=status,
    )
    if runs := [run for arm in arms if (run := arm.place(options.out, 0)).exists()]:
        write_page(views(runs), options.out / "report.html")
    slower = gate.slower_than(result, before) if before else []
    if options.json:
        print_json({**asdict(result), "slower": slower})
    else:
        _print(result, options.out)
    for why in slower:
        status(f"slower than {options.against}: {why}")
    if not slower and not any(lane.curves for lane in result.lanes):
        raise TrainingError(f"no run of the race finished: {result.lanes[0].failed[0]}")
    return 1 if slower else 0


def _arm(text: str, sets: list[str]) -> race.Arm:
    name, *own = text.split("@")
    if bad := [part for part in own if "=" not in part]:
        raise ConfigError(f"a variant is RECIPE@TABLE.KEY=VALUE, got {bad[0]!r} in {text!r}")
    recipe = load_recipe(name, [*sets, *own], say=status)
    if recipe.workload == "pretrain" and not recipe.model.is_shaped:
        raise ConfigError(f"{name}: a race needs the model's shape: give [model] in the recipe")
    return race.Arm("@".join([name.removesuffix(".toml"), *own]), recipe)


def _print(result: race.Result, folder: Path) -> None:
    names = [lane.name for lane in result.lanes]
    if max(map(len, names)) > WIDEST_NAME:  # the lines below the table say which is which
        numbered = [replace(lane, name=f"recipe {n}") for n, lane in enumerate(result.lanes, 1)]
        result = replace(result, lanes=tuple(numbered))
        names = [f"recipe {n}, {name}" for n, name in enumerate(names, 1)]
    table, joules = race.rows(result), race.COLUMNS.index("kJ")
    measured = any(row[joules] not in ("", DASH) for row in table)
    kept = [place for place in range(len(race.COLUMNS)) if measured or place != joules]
    shown = [tuple(row[place] for place in kept) for row in table]
    print(f"Time to loss over {counted(result.seeds, 'seed')}, on the same data")
    out = Output(markup=False)
    out.print(Grid([race.COLUMNS[place] for place in kept], shown, right=(0,), named_below=True))
    for name, lane in zip(names, result.lanes, strict=True):
        losses = ", ".join(f"{loss:.4f}" for loss in lane.lowest)
        start = ", ".join(f"{start_up_s:.1f}" for start_up_s in lane.start_up_s)
        apart = race.ends_apart(result.lanes[0], lane) if lane is not result.lanes[0] else ""
        losses += f", against the first {apart}" if apart else ""
        ended = f"lowest losses {losses}; start-up {start} s" if lane.curves else "no run finished"
        print(f"{name}: {ended}")
        for why in lane.failed:
            print(f"  a run failed: {why}")
    early = any(cell.startswith(race.AT_MOST) for row in table for cell in row)
    unknown = " ≤: reached by the first validation, so the exact time is not known." if early else ""
    out.print(
        "Median of the seeds [lowest, highest]; seconds since the command, validations included; net: without start-up;"
        f" speed-ups and differences against the first recipe have 90% intervals.{unknown}{'' if measured else ' No joules: no GPU counts them here.'}"
    )
    print(f"written to {folder / race.RESULT}; the curves of the first seed: {folder / 'report.html'}")
