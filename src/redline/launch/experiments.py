"""What `redline launch` starts: one or more runs of a recipe, and what each of them gets. No torch.

    job = Job(recipe="nano", verb=("train",), overrides=("train.lr=1e-3,3e-3",), run=Path("runs/nano"), ...)
    [experiment.run for experiment in job.experiments]      # runs/nano-lr-1e-3, runs/nano-lr-3e-3

A place to run them (local.py, slurm.py) is a file with `script(job)`, what it would do as text, and `submit(job)`, which
does it and returns a table for every submission. Several values in one override are separated by commas; commas inside
brackets, braces or quotes belong to a value, so a list stays one value.
"""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

from redline.errors import ConfigError
from redline.launch.processes import PROGRAM


@dataclass(frozen=True, kw_only=True)
class Experiment:
    run: Path
    overrides: tuple[str, ...]
    arguments: tuple[str, ...]
    """Arguments of `redline`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """`gpus`, `cpus` and `memory` are a node's. Without GPUs a node runs one process."""

    recipe: str
    verb: tuple[str, ...]
    """The command that runs it: ("train",) or ("rl", "run")."""
    overrides: tuple[str, ...]
    run: Path
    """The run folder; of several runs, the beginning of their names."""
    nodes: int
    gpus: int
    cpus: int
    memory: str
    time_limit: str

    @cached_property
    def experiments(self) -> tuple[Experiment, ...]:
        """A run for every combination of the values."""
        choices = [_choices(override) for override in self.overrides]
        varied = [key for key, values in choices if len(values) > 1]
        found = {}
        for values in product(*(values for _, values in choices)):
            given = dict(zip((key for key, _ in choices), values, strict=True))
            named = "".join(f"-{key.rpartition('.')[2]}-{given[key]}" for key in varied)
            run = self.run.with_name(self.run.name + re.sub(r"[^\w.+-]+", "-", named))
            if run in found:
                raise ConfigError(f"two experiments have the same run folder, {run}: give each value once")
            overrides = tuple(f"{key}={value}" for key, value in given.items())
            sets = [word for override in overrides for word in ("--set", override)]
            several = ("--nproc", str(self.gpus)) if self.gpus > 1 else ()
            words = (*self.verb, self.recipe, *sets, "--run", str(run), *several)
            found[run] = Experiment(run=run, overrides=overrides, arguments=words)
        return tuple(found.values())

    @property
    def report(self) -> tuple[str, ...]:
        """The arguments of `redline` that compare the runs on one page."""
        page = self.run.with_name(f"{self.run.name}-report.html")
        return ("report", *(str(experiment.run) for experiment in self.experiments), "--out", str(page))


def command_line(arguments: tuple[str, ...]) -> str:
    return shlex.join([*PROGRAM, *arguments])


def _choices(override: str) -> tuple[str, list[str]]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes table.key=value, got {override!r}")
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    values = [part.strip() for part in parts]
    if len(values) > 1 and not all(values):
        raise ConfigError(f"--set {override!r} has an empty value between commas: remove the extra comma")
    return key.strip(), values
