"""Options and printing that several commands share."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.errors import ConfigError


def add_recipe(command: argparse.ArgumentParser, example: str = "train.steps=100") -> None:
    command.add_argument("recipe", help="a shipped recipe (see `redline recipes`) or a path to a .toml file")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help=f"override a value, e.g. {example}, or take it back with =none; may be repeated",
    )


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", action="store_true", help="print JSON for programs instead of text for people"
    )


def recipe_of(options: argparse.Namespace) -> Recipe:
    return load_recipe(options.recipe, options.set)


def typed_pins(options: argparse.Namespace) -> frozenset[str]:
    """Names of the plan values that the user typed with --set."""
    return frozenset(
        text.partition("=")[0].strip().removeprefix("plan.")
        for text in options.set
        if text.strip().startswith("plan.")
    )


def check_positive(option: str, value: float) -> None:
    """A time that the user gives; 0, nan and inf are none."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option} must be a finite number above 0, got {value:g}")


def tokenise(recipe: Recipe) -> None:
    """Tokenise the corpus, if it was not yet, and show how far it is: before anything is measured, of which
    it is no part. A stream is tokenised as it is read."""
    from redline.data.build import prepare

    if not recipe.data.stream:
        prepare(recipe.data, recipe.model.vocab_size, progress=byte_progress("tokenising"))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def status(text: str) -> None:
    """A line about progress, on standard error so that standard output stays clean."""
    print(text, file=sys.stderr, flush=True)


def byte_progress(what: str) -> Callable[[int, int, int], None]:
    """A progress bar for source files read: share, tokens a second, time left. Redrawn in a terminal, else a
    line every 5 s."""
    from redline.record.units import format_duration, format_rate

    started_s = last_s = time.monotonic()
    terminal, finished = sys.stderr.isatty(), False

    def show(done: int, total: int, tokens: int) -> None:
        nonlocal last_s, finished
        now_s = time.monotonic()
        if finished or (now_s - last_s < (0.2 if terminal else 5.0) and done < total):
            return
        last_s, elapsed_s, finished = now_s, max(1e-9, now_s - started_s), done >= total
        left_s = elapsed_s * (total - done) / done if done else None
        bar = "█" * (24 * done // max(1, total))
        text = (
            f"{what} [{bar:<24}] {done / max(1, total):4.0%}  {format_rate(tokens / elapsed_s, 'tokens')} "
            f" left {format_duration(left_s)}"
        )
        print(
            f"\r\033[K{text}" if terminal else text,
            end="" if terminal and not finished else "\n",
            file=sys.stderr,
            flush=True,
        )

    return show
