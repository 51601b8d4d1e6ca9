"""Rejection-sampling fine-tuning: sample many answers a question, keep the correct ones, train on them, test
before and after.

redline rft run rft/units-smollm2 --set model.init_from=SmolLM2.gguf --set task.data=units/    test, sample, train, test
redline rft run rft/units-smollm2 --rounds 4               the loop again, each round sampled by what the last
                                                           one trained
redline rft sample rft/units-smollm2 --preset quality      one stage; if it is killed, run it again and it
                                                           resumes
redline rft train rft/units-smollm2 --on answers           plain fine-tuning on the reference solutions, for
                                                           comparison
redline rft test rft/units-smollm2 --rows all              all weights of the run that have not been tested
                                                           yet
redline rft stats runs/units-smollm2
redline rft export runs/units-smollm2 rft.json             or .jsonl, .parquet
"""

import argparse
from pathlib import Path
from typing import Any

HELP = "rejection-sampling fine-tuning: sample, train, test"

_STAGES = {
    "run": "test, sample, train and test again; stages that are finished are not repeated",
    "sample": "sample answers to the training questions into the run's store",
    "train": "fine-tune on the correct samples, or on the reference solutions",
    "test": "greedy accuracy and answer rate on held-out questions",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json, add_recipe

    verbs = command.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, about in _STAGES.items():
        stage = verbs.add_parser(name, help=about)
        add_recipe(stage, example="sample.temperature=0.9")
        stage.add_argument("--run", type=Path, metavar="DIR", help="the run folder (default runs/RECIPE)")
        stage.add_argument(
            "--preset",
            metavar="NAME",
            help="samples and temperature: quality (50, 0.5), balanced (30, 0.7), speed (20, 0.9)",
        )
        stage.add_argument(
            "--profile", metavar="NAME", help="upper bounds of a known GPU, as in `redline plan`"
        )
        stage.add_argument(
            "--device", choices=("cuda", "cpu"), help="compute there (default: cuda where there is one)"
        )
        stage.add_argument("--plan", metavar="FILE|auto", help="as in `redline train`")
        stage.add_argument("--quiet", action="store_true", help="no live view")
        if name == "train":
            stage.add_argument(
                "--on",
                choices=("samples", "answers"),
                default="samples",
                help="what to train on (default samples)",
            )
        if name in ("test", "run"):
            stage.add_argument(
                "--rows",
                metavar="N",
                help="the first N questions of the test split, or all (default: the recipe's)",
            )
        if name == "run":
            stage.add_argument(
                "--rounds",
                type=int,
                default=1,
                metavar="N",
                help="repeat the loop, each round sampled by what the last one trained",
            )
        if name == "test":
            stage.add_argument(
                "--weights",
                choices=("base", "answers", "samples"),
                help="only these (default: all that there are)",
            )
        add_json(stage)
    _add_readers(verbs)


def _add_readers(verbs: Any) -> None:
    from redline.cli.options import add_json

    stats = verbs.add_parser(
        "stats", help="what the samples of a run say: solved share, pass@k, speed, hardest questions"
    )
    stats.add_argument("run_folder", type=Path, metavar="RUN")
    add_json(stats)
    export = verbs.add_parser(
        "export", help="write the samples: rft.json triples, or all of them as .jsonl or .parquet"
    )
    export.add_argument("run_folder", type=Path, metavar="RUN")
    export.add_argument(
        "out", type=Path, metavar="OUT", help="a name that ends with .json, .jsonl or .parquet"
    )
    export.add_argument(
        "--per-question",
        type=int,
        metavar="N",
        help="correct answers kept a question, 0: all (default: the recipe's)",
    )
    add_json(export)


def run(options: argparse.Namespace) -> None:
    if options.verb == "stats":
        _stats(options)
    elif options.verb == "export":
        _export(options)
    else:
        _stage(options)


def _stage(options: argparse.Namespace) -> None:
    from contextlib import closing

    from redline.cli import rft_tables as tables
    from redline.cli.live import make_view
    from redline.cli.options import check_least, print_json, recipe_of, status
    from redline.cli.plan import chosen, outside_of
    from redline.plan.profiles import fewer_samples
    from redline.record.run import RunFolder
    from redline.train.open_run import changes

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


def _check(recipe: Any) -> None:
    """What can be said before torch is imported."""
    from redline.errors import ConfigError
    from redline.tasks.registry import load_task
    from redline.train.places import find

    if recipe.workload != "rft":
        raise ConfigError(
            f"{recipe.name} is a recipe of workload {recipe.workload}: use `redline train {recipe.name}`"
        )
    load_task(recipe.task.name, recipe.task.data)
    if recipe.sample.sampler is not None:
        find(Path(recipe.sample.sampler))


def _rows(options: argparse.Namespace) -> list[str]:
    from redline.errors import ConfigError

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
    from redline.cli.options import print_json
    from redline.cli.rft_tables import print_stats
    from redline.rft.stats import stats

    found = stats(options.run_folder)
    if options.json:
        print_json(found)
    else:
        print_stats(found)


def _export(options: argparse.Namespace) -> None:
    from redline.cli.options import print_json
    from redline.record.units import visible
    from redline.rft.export import export

    count = export(options.run_folder, options.out, per_question=options.per_question)
    if options.json:
        print_json({"out": str(options.out), "rows": count})
    else:
        print(visible(f"{options.out}: {count:,} rows"))
