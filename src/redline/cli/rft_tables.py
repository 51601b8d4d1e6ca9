"""What `redline rft` prints: accuracies with their intervals, times of the stages, statistics of a store."""

import shlex
from pathlib import Path
from typing import Any

from redline.config.recipe import Recipe
from redline.record.units import format_count, format_duration, format_rate, format_share, visible
from redline.report.grid import show

_NAMES = {"base": "before", "answers": "after plain fine-tuning on the answers", "samples": "after RFT"}
_APART = {"in_train": "in the training data too", "unseen": "not in training data"}


def describe(recipe: Recipe, folder: Path) -> str:
    """One line: what is run where."""
    sampler = recipe.sample.server or recipe.sample.sampler or "itself"
    assert recipe.task is not None
    return (
        f"{recipe.name}: {recipe.model.init_from} on task {recipe.task.name}, {recipe.sample.samples_per_question}"
        f" samples a question at {recipe.sample.temperature} by {sampler}, run folder {folder}"
    )


def print_stage(verb: str, found: Any, folder: Path) -> None:
    """The outcome of one stage, or of all."""
    if verb == "test":
        print_accuracies(found)
    elif verb == "run":
        _print_run(found)
    elif verb == "sample":
        _print_sampled(found)
    else:
        _print_trained(found)
    if isinstance(found, dict) and found["why"] != "finished":
        print(f"{found['why']}; to resume, run the same command again")
    name = visible(shlex.quote(str(folder)))
    print(f"run folder: {name}")
    print(f"  redline report {name}                  accuracies, samples, speed, as one page")
    print(f"  redline diagnose {name}                what would make it faster")
    print(f"  redline rft export {name} rft.json     the correct answers; rft stats: figures of the samples")


def _print_run(found: dict[str, Any]) -> None:
    _print_sampled(found["sample"])
    if "train" in found:
        _print_trained(found["train"])
    print_accuracies([line for line in (found.get("before"), found.get("after")) if line is not None])
    if "stages_s" in found:
        times = found["stages_s"]
        told = ", ".join(f"{name} {format_duration(spent_s)}" for name, spent_s in times.items())
        print(f"time: {told}; {format_duration(sum(times.values()))} in all")


def _print_sampled(found: dict[str, Any]) -> None:
    speed = format_rate(found["tokens"] / found["elapsed_s"] if found["tokens"] else None, "tok")
    correct = format_share(found["correct"] / max(1, found["samples"]))
    solved = f"{found['solved']:,} of {found['questions']:,} questions solved"
    drawn = speed if found["drawn"] else "none drawn now"
    print(f"samples: {found['samples']:,}, {correct} correct; {solved}; {drawn}")
    if found["cut"]:
        print(f"{found['cut']:,} of them ran out of tokens, counted as wrong: raise sample.max_new_tokens")
    if failures := found["scorer_failures"]:
        print(f"the scorer failed on {failures:,} of them, counted as wrong (`redline rft export` says why)")


def _print_trained(found: dict[str, Any]) -> None:
    rate = f", {format_rate(found['rows_per_s'], 'rows')}" if found["rows_per_s"] else ""
    loss = f", last loss {found['loss']:.3f}" if found["loss"] is not None else ""
    done = f"{found['examples']:,} examples, {found['updates']:,} updates"
    print(f"training on {found['on']}: {done}{loss}{rate}")


def print_accuracies(lines: list[dict[str, Any]]) -> None:
    """A row a test, and below it its questions that were in the training data and those that were not."""
    rows = []
    for line in lines:
        rows.append((_NAMES[line["weights"]], *_shares(line)))
        rows += [(f"  {text}", *_shares(line[name])) for name, text in _APART.items() if name in line]
    columns = ("greedy", "n", "accuracy", "95 %", "answer rate", "95 %")
    show(columns, rows, right=range(1, 6))
    for line in lines:
        name, cut, failed = _NAMES[line["weights"]], line["cut"], line["scorer_failures"]
        if cut:
            print(f"{name}: {cut:,} answers ran out of tokens, counted as wrong")
        if failed:
            print(f"{name}: the scorer failed on {failed:,} answers, counted as wrong")


def _shares(line: dict[str, Any]) -> list[str]:
    cells = [f"{line['n']:,}"]
    for name in ("accuracy", "answer_rate"):
        cells += [f"{line[name]:.3f}", f"{line[f'{name}_low']:.3f} to {line[f'{name}_high']:.3f}"]
    return cells


def print_stats(found: dict[str, Any]) -> None:
    share, speed = format_share, format_rate(found["tokens_per_s"], "tok")
    asked, drawn = f"{found['asked']:,} of {found['questions']:,} asked", f"{found['samples']:,}"
    rows = [
        ("questions", f"{asked}, {found['solved']:,} solved ({share(found['solved_share'])})"),
        ("samples", f"{drawn}, {found['correct']:,} correct ({share(found['success_rate'])})"),
        ("cut off", f"{found['cut']:,} ran out of tokens (sample.max_new_tokens), counted as wrong"),
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
