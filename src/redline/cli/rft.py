"""Rejection-sampling fine-tuning: sample many answers a question, keep the correct ones, train on them, test
before and after.

redline rft run rft/units-smollm2 --set model.init_from=SmolLM2.gguf --set task.data=units/
redline rft run rft/units-smollm2 --rounds 4             repeat the loop; each round samples from the last one's model
redline rft sample rft/units-smollm2 --preset quality    one stage; if it is killed, run it again and it resumes
redline rft train rft/units-smollm2 --on answers         plain fine-tuning on the reference solutions, to compare
redline rft test rft/units-smollm2 --rows all            all weights of the run that have not been tested yet
redline rft stats runs/units-smollm2
redline rft export runs/units-smollm2 rft.json           or .jsonl, .parquet
"""

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from redline.cli import rft_tables as tables
from redline.cli.arguments import DEVICE, JSON, PLAN, RECIPE
from redline.cli.live import make_view
from redline.cli.options import answer, check_least, print_json, recipe_of, status
from redline.cli.plan import chosen, outside_of
from redline.config.recipe import Recipe
from redline.errors import ConfigError
from redline.plan.profiles import fewer_samples
from redline.record.run import RunFolder
from redline.record.units import visible
from redline.rft.export import export
from redline.rft.stats import stats
from redline.tasks.registry import load_task
from redline.train.open_run import changes
from redline.train.places import find

STAGE = f"""
{RECIPE}
--run DIR        the run folder (default: runs/RECIPE)
--preset NAME    samples and temperature: quality (50, 0.5), balanced (30, 0.7), speed (20, 0.9)
--profile NAME   upper bounds of a known GPU, as in `redline plan`
{DEVICE}
{PLAN}
--quiet          no live view
{JSON}
"""
ROWS = "--rows N|all   the first N questions of the test split, or all (default: the recipe's)"
ARGUMENTS = {
    "run": f"""test, sample, train and test again; finished stages are not repeated
{STAGE}
{ROWS}
--rounds N   repeat the loop; each round samples from the last one's model (default 1)""",
    "sample": f"""sample answers to the training questions into the run's store
{STAGE}""",
    "train": f"""fine-tune on the correct samples, or on the reference solutions
{STAGE}
--on {{samples,answers}}   what to train on (default samples)""",
    "test": f"""greedy accuracy and answer rate on held-out questions
{STAGE}
{ROWS}
--weights {{base,answers,samples}}   only these (default: all there are)""",
    "stats": f"""what the samples of a run say: solved share, pass@k, speed, hardest questions
RUN   the run folder
{JSON}""",
    "export": f"""write the samples: rft.json triples, or all of them as .jsonl or .parquet
RUN                the run folder
OUT                a name that ends in .json, .jsonl or .parquet
--per-question N   correct answers to keep for a question, 0 for all (default: the recipe's)
{JSON}""",
}


def run(options: argparse.Namespace) -> None:
    if options.verb == "stats":
        _stats(options)
    elif options.verb == "export":
        _export(options)
    else:
        _stage(options)


def _stage(options: argparse.Namespace) -> None:
    check_least("--rounds", getattr(options, "rounds", None))
    outside = outside_of(options)
    recipe = recipe_of(options, *_rows(options), check=_check)
    recipe = fewer_samples(recipe, outside.profile, say=status)
    plan = chosen(options, recipe, 1, say=status)
    folder = options.run or Path("runs") / recipe.name
    if getattr(options, "rounds", 1) == 1:
        changes(RunFolder(folder), recipe)
    status(tables.describe(recipe, folder))
    with closing(make_view(quiet=options.quiet or options.json)) as view:
        if options.verb == "run":
            from redline.rft.run import run_rounds

            found: Any = run_rounds(recipe, plan, folder, outside, options.rounds, observers=[view])
        else:
            from redline.rft.session import open_session

            with open_session(recipe, plan, folder, outside, observers=[view]) as session:
                found = _STAGE_CALLS[options.verb](session, options)
    if options.json:
        print_json(found[0] if options.verb == "run" and options.rounds == 1 else found)
    elif options.verb != "run":
        tables.print_stage(options.verb, found, folder)
    else:
        for number, report in enumerate(found, start=1):
            if options.rounds > 1:
                print(f"\nround {number} of {options.rounds}")
            tables.print_stage("run", report, Path(report["run"]))


def _check(recipe: Recipe) -> None:
    """What can be refused before torch is imported."""
    if recipe.workload != "rft" or recipe.task is None:
        raise ConfigError(
            f"{recipe.name} is a recipe of workload {recipe.workload}: use `redline train {recipe.name}`"
        )
    load_task(recipe.task.name, recipe.task.data)
    if recipe.sample.sampler is not None:
        find(Path(recipe.sample.sampler))


def _rows(options: argparse.Namespace) -> list[str]:
    if (rows := getattr(options, "rows", None)) is None:
        return []
    if rows != "all" and not (rows.isdecimal() and int(rows) > 0):
        raise ConfigError(f"--rows takes a whole number greater than 0, or all; got {rows!r}")
    return [f"test.rows={0 if rows == 'all' else int(rows)}"]


def _run_sample(session: Any, options: argparse.Namespace) -> Any:
    from redline.rft.sample import sample

    return {"run": str(session.folder.path), **vars(sample(session))}


def _run_train(session: Any, options: argparse.Namespace) -> Any:
    from redline.rft.train import train

    return {"run": str(session.folder.path), **train(session, options.on)}


def _run_test(session: Any, options: argparse.Namespace) -> Any:
    from redline.rft.test import run_test, trained

    chosen = [options.weights] if options.weights else trained(session.folder.path)
    return [run_test(session, weights) for weights in chosen]


_STAGE_CALLS = {"sample": _run_sample, "train": _run_train, "test": _run_test}


def _stats(options: argparse.Namespace) -> None:
    found = stats(options.run)
    answer(options, found, lambda: tables.print_stats(found))


def _export(options: argparse.Namespace) -> None:
    count = export(options.run, options.out, per_question=options.per_question)
    answer(
        options,
        {"out": str(options.out), "rows": count},
        lambda: print(visible(f"{options.out}: {count:,} rows")),
    )
