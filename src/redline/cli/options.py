"""What several commands do with their options, and how they print."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.config.load import load_recipe, shipped
from redline.config.recipe import Recipe
from redline.data.build import prepare
from redline.data.shards import Manifest
from redline.errors import ConfigError, need
from redline.launch.processes import LAUNCHER
from redline.machine.facts import MachineFacts
from redline.machine.store import Ceilings, cached
from redline.record.units import format_rate, visible
from redline.report.grid import Output
from redline.train.places import find

if TYPE_CHECKING:
    from redline.engine.ray import OnRay


def recipe_of(options: argparse.Namespace, *more: str, runs: Sequence[str] = ()) -> Recipe:
    """The recipe with the user's overrides. A command that trains says which workloads it `runs`. A shape that the recipe
    leaves out is read from the initial weights, which needs torch: everything else is checked before."""
    preset = getattr(options, "preset", None)
    recipe = load_recipe(options.recipe, [*options.set, *more], preset=preset, say=say_once)
    if runs:
        _check_run(options.recipe, recipe, runs)
    if recipe.model.is_shaped or recipe.model.init_from is None:
        return recipe
    find(Path(recipe.model.init_from))  # report a missing file before importing torch
    from redline.train.restore import with_shape

    return with_shape(recipe)


def _check_run(name: str, recipe: Recipe, workloads: Sequence[str]) -> None:
    if recipe.workload not in workloads:
        command = " ".join(verb_of(recipe.workload))
        raise ConfigError(f"{name} is a recipe of workload {recipe.workload}: use `redline {command} {name}`")
    if recipe.sample.sampler is not None:
        find(Path(recipe.sample.sampler))
    tasks = [(recipe.task.name, recipe.task.data)] if recipe.task else []
    if (rl := recipe.rl) is not None:
        tasks = [(task, rl.data_of(name)) for task, name in zip(rl.domains, rl.names, strict=True)]
    for task, folder in tasks:
        from redline.tasks.registry import load_task  # here: pre-training has none

        load_task(task, folder)


def name_of(options: argparse.Namespace, recipe: Recipe) -> str:
    """The name as the user typed it: nano and okadfa/nano are both called nano inside."""
    given: str = options.recipe
    return given if given in shipped() and recipe.name == given.rpartition("/")[2] else recipe.name


def run_of(options: argparse.Namespace, recipe: Recipe) -> Path:
    given: Path | None = options.run
    return given or Path("runs") / name_of(options, recipe).replace("/", "-")


def verb_of(workload: str) -> tuple[str, ...]:
    """The command that trains a recipe of this workload."""
    return (workload, "run") if workload in ("rft", "rl") else ("train",)


def ceilings_of(facts: MachineFacts, *, refresh: bool = False) -> Ceilings:
    """The machine's ceilings, measured now if they are not known; only then is torch imported."""
    if not refresh and (kept := cached(facts)) is not None:
        return kept
    from redline.machine.ceilings import load_or_measure

    status("measuring this machine's ceilings")
    return load_or_measure(facts, refresh=refresh, progress=status)


def say_once(text: str) -> None:
    """A status that only one of several processes prints: the one that started the others, or the first."""
    if LAUNCHER not in os.environ and os.environ.get("RANK", "0") == "0":
        status(text)


def find_model(options: argparse.Namespace) -> Path:
    """The weights that the user names, found before torch is imported, which takes seconds."""
    found = find(Path(options.model), options.checkpoint)
    if sys.stderr.isatty():  # somebody waits
        status(f"opening {found}")
    return found


def typed_pins(options: argparse.Namespace) -> frozenset[str]:
    """Names of the plan values that the user typed with --set."""
    keys = (text.partition("=")[0].strip() for text in options.set)
    return frozenset(key.removeprefix("plan.") for key in keys if key.startswith("plan."))


def on_ray(options: argparse.Namespace) -> "OnRay | None":
    if options.on != "ray":
        if options.workers is not None or options.ray_address is not None:
            raise ConfigError("--workers and --ray-address are for samples drawn on Ray: add --on ray")
        return None
    need("ray", extra="ray")
    from redline.engine.ray import OnRay

    return OnRay(workers=options.workers, address=options.ray_address)


def tokenise(recipe: Recipe) -> str | None:
    """Tokenise the pre-training corpus unless that is done, and show progress: no measurement may include it. Returns the
    data's fingerprint; None for a stream, which is tokenised as it is read, and for other workloads."""
    if recipe.workload != "pretrain" or recipe.data.stream:
        return None
    folder = prepare(recipe.data, recipe.model.vocab_size, progress=byte_progress("tokenising"))
    return Manifest.load(folder).fingerprint


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=lambda part: getattr(part, "__dict__", None) or str(part)))


def answer(options: argparse.Namespace, value: Any, show: Callable[[], object]) -> None:
    """The value as JSON if the user wants that, else as `show` prints it."""
    if options.json:
        print_json(value)
    else:
        show()


def status(text: str) -> None:
    """A line about progress, on standard error so that standard output stays clean."""
    print(visible(text), file=sys.stderr, flush=True)


def byte_progress(what: str) -> Callable[[int, int, int], None]:
    """Shows how much of the source files has been read: a bar in a terminal, else a line every 5 s."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    rate_column = TextColumn("{task.fields[rate]}")
    columns = (TextColumn(what), BarColumn(24), TaskProgressColumn(), rate_column, TimeRemainingColumn())
    bar = Progress(*columns, console=Output(stderr=True))
    task, began_s, told_s, terminal = bar.add_task(what, rate=""), time.monotonic(), 0.0, sys.stderr.isatty()

    def show(done: int, total: int, tokens: int) -> None:
        nonlocal told_s
        if bar.finished:
            return
        spent_s = max(1e-9, time.monotonic() - began_s)
        rate, ended = format_rate(tokens / spent_s, "tokens"), done >= total
        bar.update(task, completed=done, total=total, rate=rate)
        if terminal:
            bar.stop() if ended else bar.start()
        elif ended or spent_s - told_s >= 5.0:
            told_s = spent_s
            print(f"{what}: {done / max(1, total):.0%}, {rate}", file=sys.stderr, flush=True)

    return show
