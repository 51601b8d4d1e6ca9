"""Rejection-sampling fine-tuning: sample many answers per question, keep the correct ones, train on them, test
before and after.

redline rft run rft/units-smollm2 --set model.init_from=SmolLM2.gguf --set task.data=units/
redline rft run rft/units-smollm2 --rounds 4             repeat the loop; each round samples from the last one's model
redline rft run rft/units-smollm2 --on ray --workers 8   samples are drawn by workers on a Ray cluster
redline rft sample rft/units-smollm2 --preset quality    one stage; if it is killed, run it again and it resumes
redline rft train rft/units-smollm2 --on answers         plain fine-tuning on the reference solutions, to compare
redline rft test rft/units-smollm2 --rows all            all weights of the run that have not been tested yet
redline rft stats runs/rft-units-smollm2
redline rft export runs/rft-units-smollm2 rft.json       or .jsonl, .parquet
"""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cli.live import make_view
from redline.cli.options import answer, on_ray, print_json, recipe_of, run_of, status
from redline.cli.plan import chosen, outside_of
from redline.cli.train import end_with_launcher, exporters_for
from redline.config.recipe import Recipe
from redline.errors import ConfigError
from redline.plan.bounds import fewer_samples
from redline.record.export import check_names
from redline.record.observe import Observer
from redline.record.run import RunFolder
from redline.record.units import format_count, format_duration, format_rate, format_share, visible
from redline.report.grid import show
from redline.rft.stats import export, stats
from redline.train.open_run import changes

if TYPE_CHECKING:
    from redline.rft.session import Session

STAGE = """
@RECIPE
--run DIR        the run folder (default: runs/RECIPE)
--preset NAME    samples and temperature: quality (50, 0.5), balanced (30, 0.7), speed (20, 0.9)
--profile NAME   upper bounds of a known GPU, as in `redline plan`
@DEVICE
@PLAN
--quiet          no live view
@JSON
"""
EXPORT = "--export NAME...   also send the training's metrics to tensorboard, wandb or mlflow"
ROWS = "--rows N|all   the first N questions of the test split, or all (default: the recipe's)"
ARGUMENTS = {
    "run": f"""test, sample, train and test again; finished stages are not repeated
{STAGE}
@ON_RAY
{EXPORT}
{ROWS}
--rounds N   repeat the loop; each round samples from the last one's model (default 1)""",
    "sample": f"""sample answers to the training questions into the run's store
{STAGE}
@ON_RAY""",
    "train": f"""fine-tune on the correct samples, or on the reference solutions
{STAGE}
{EXPORT}
--on {{samples,answers}}   what to train on (default samples)""",
    "test": f"""greedy accuracy and answer rate on held-out questions
{STAGE}
{ROWS}
--weights {{base,answers,samples}}   the weights to test (default: all there are)""",
    "stats": """what the samples of a run say: solved share, pass@k, speed, hardest questions
RUN   the run folder
@JSON""",
    "export": """write the samples: rft.json triples, or all of them as .jsonl or .parquet
RUN                the run folder
OUT                a name that ends in .json, .jsonl or .parquet
--per-question N   correct answers to keep for a question, 0 for all (default: the recipe's)
@JSON""",
}


def run(options: argparse.Namespace) -> None:
    if options.verb == "stats":
        found = stats(options.run)
        answer(options, found, lambda: print_stats(found))
    elif options.verb == "export":
        count = export(options.run, options.out, per_question=options.per_question)
        written = {"out": str(options.out), "rows": count}
        answer(options, written, lambda: print(visible(f"{options.out}: {count:,} rows")))
    else:
        _stage(options)


def _stage(options: argparse.Namespace) -> None:
    end_with_launcher()
    exported = getattr(options, "export", ())
    check_names(exported)
    outside = outside_of(options)
    recipe = recipe_of(options, *_rows(options), runs=("rft",))
    recipe = fewer_samples(recipe, outside.profile, say=status)
    if getattr(options, "on", None) == "ray" and recipe.sample.server is not None:
        raise ConfigError("--on ray samples with the model itself: remove sample.server from the recipe")
    place = on_ray(options) if options.verb in ("run", "sample") else None  # None: drawn here
    plan = chosen(options, recipe, 1, say=status)
    folder = run_of(options, recipe)
    if getattr(options, "rounds", 1) == 1:
        changes(RunFolder(folder), recipe)
    status(describe(recipe, folder))

    def exporters(record: Path, resume_step: int) -> Sequence[Observer]:
        name = f"{recipe.name}/{record.relative_to(folder)}"
        return exporters_for(exported, recipe, record, resume_step, name=name)

    with closing(make_view(quiet=options.quiet or options.json)) as view:
        how: dict[str, Any] = {"observers": [view], "on_ray": place, "exporters": exporters}
        if options.verb == "run":
            from redline.rft.run import run_rounds

            found: Any = run_rounds(recipe, plan, folder, outside, options.rounds, **how)
        else:
            from redline.rft.session import open_session

            with open_session(recipe, plan, folder, outside, **how) as session:
                found = _one_stage(session, options)
    if options.json:
        print_json(found[0] if options.verb == "run" and options.rounds == 1 else found)
    elif options.verb != "run":
        print_stage(options.verb, found, folder)
    else:
        for number, report in enumerate(found, start=1):
            if options.rounds > 1:
                print(f"\nround {number} of {options.rounds}")
            print_stage("run", report, Path(report["run"]))


def _rows(options: argparse.Namespace) -> list[str]:
    if (rows := getattr(options, "rows", None)) is None:
        return []
    if rows != "all" and not (rows.isdecimal() and int(rows) > 0):
        raise ConfigError(f"--rows takes a whole number greater than 0, or all; got {rows!r}")
    return [f"test.rows={0 if rows == 'all' else int(rows)}"]


def _one_stage(session: "Session", options: argparse.Namespace) -> Any:
    from redline.rft.sample import sample
    from redline.rft.test import run_test, trained
    from redline.rft.train import train

    path = session.folder.path
    if options.verb == "sample":
        return {"run": str(path), **vars(sample(session))}
    if options.verb == "train":
        return {"run": str(path), **train(session, options.on)}
    chosen = [options.weights] if options.weights else trained(path)
    return [run_test(session, weights) for weights in chosen]


_NAMES = {"base": "before", "answers": "after plain fine-tuning on the answers", "samples": "after RFT"}
_APART = {"in_train": "also in the training data", "unseen": "not in training data"}


def describe(recipe: Recipe, folder: Path) -> str:
    sampler = recipe.sample.server or recipe.sample.sampler or "the model itself"
    assert recipe.task is not None
    return (
        f"{recipe.name}: {recipe.model.init_from} on task {recipe.task.name}, {recipe.sample.samples_per_question}"
        f" samples per question at temperature {recipe.sample.temperature} from {sampler}, run folder {folder}"
    )


def print_stage(verb: str, found: Any, folder: Path) -> None:
    stages = found if verb == "run" else {verb: found}
    if "sample" in stages:
        _print_sampled(stages["sample"])
    if "train" in stages:
        _print_trained(stages["train"])
    if tests := stages.get("test") or [stages[when] for when in ("before", "after") if stages.get(when)]:
        print_accuracies(tests)
    if times := stages.get("stages_s"):
        told = ", ".join(f"{name} {format_duration(spent_s)}" for name, spent_s in times.items())
        print(f"time: {told}; {format_duration(sum(times.values()))} in all")
    if isinstance(found, dict) and found["why"] != "finished":
        print(f"{found['why']}; to resume, run the same command again")
    name = visible(shlex.quote(str(folder)))
    print(f"run folder: {name}")
    print(f"  redline report {name}                  accuracies, samples, speed, as one page")
    print(f"  redline diagnose {name}                what would make it faster")
    print(f"  redline rft export {name} rft.json     the correct answers; rft stats: sample figures")


def _print_sampled(found: dict[str, Any]) -> None:
    speed = format_rate(found["tokens"] / found["elapsed_s"] if found["tokens"] else None, "tok")
    correct = format_share(found["correct"] / max(1, found["samples"]))
    solved = f"{found['solved']:,} of {found['questions']:,} questions solved"
    drawn = speed if found["drawn"] else "none drawn this time"
    print(f"samples: {found['samples']:,}, {correct} correct; {solved}; {drawn}")
    if found["cut"]:
        print(f"{found['cut']:,} of them ran out of tokens and count as wrong: raise sample.max_new_tokens")
    if failures := found["scorer_failures"]:
        print(f"the scorer failed on {failures:,} of them (counted as wrong; `redline rft export` says why)")


def _print_trained(found: dict[str, Any]) -> None:
    rate = f", {format_rate(found['rows_per_s'], 'rows')}" if found["rows_per_s"] else ""
    loss = f", last loss {found['loss']:.3f}" if found["loss"] is not None else ""
    done = f"{found['examples']:,} examples, {found['updates']:,} updates"
    print(f"training on {found['on']}: {done}{loss}{rate}")


def print_accuracies(lines: list[dict[str, Any]]) -> None:
    """Print a row per test, and below it its questions that were in the training data and those that were not."""
    rows = []
    for line in lines:
        rows.append((_NAMES[line["weights"]], *_shares(line)))
        rows += [(f"  {text}", *_shares(line[name])) for name, text in _APART.items() if name in line]
    show(("greedy", "n", "accuracy (95%)", "answer rate (95%)"), rows, right=(1, 2, 3))
    for line in lines:
        name, cut, failed = _NAMES[line["weights"]], line["cut"], line["scorer_failures"]
        if cut:
            print(f"{name}: {cut:,} answers ran out of tokens and count as wrong")
        if failed:
            print(f"{name}: the scorer failed on {failed:,} answers, which count as wrong")


def _shares(line: dict[str, Any]) -> list[str]:
    names = ("accuracy", "answer_rate")
    spans = [f"{line[n]:.3f} ({line[f'{n}_low']:.3f} to {line[f'{n}_high']:.3f})" for n in names]
    return [f"{line['n']:,}", *spans]


def print_stats(found: dict[str, Any]) -> None:
    share, speed = format_share, format_rate(found["tokens_per_s"], "tok")
    asked, drawn = f"{found['asked']:,} of {found['questions']:,} asked", f"{found['samples']:,}"
    rows = [
        ("questions", f"{asked}, {found['solved']:,} solved ({share(found['solved_share'])})"),
        ("samples", f"{drawn}, {found['correct']:,} correct ({share(found['success_rate'])})"),
        ("cut off", f"{found['cut']:,} ran out of tokens (sample.max_new_tokens) and count as wrong"),
        ("distinct", f"{found['distinct_correct']:,} correct answers that differ in more than spelling"),
        ("tokens", f"{format_count(found['tokens'])}, {speed} while sampling"),
        ("pass@k", "  ".join(f"{k}: {value:.3f}" for k, value in found["pass_at"].items())),
    ]
    show(("", ""), rows)
    families = [
        (name, f"{row['questions']:,}", share(row["solved_share"]), share(row["success_rate"]))
        for name, row in found["families"].items()
    ]
    if families:
        show(("family", "questions", "solved", "correct"), families, right=(1, 2, 3))
    hardest = [(f"{hard['correct']}/{hard['samples']}", hard["text"]) for hard in found["hardest"]]
    show(("correct", "hardest questions"), hardest, right=(0,))
    for example in found["examples"] if not found["correct"] else ():
        told = f"wrong, expected {example['expected']}, score {example['reward']:g}"
        show(("", ""), [(told, " ".join(example["text"].split()))])
