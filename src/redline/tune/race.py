"""The race: recipes trained on the same data, and how long each takes to each validation loss. No torch.

    arms = [Arm("muon", muon), Arm("adamw", adamw)]
    result = race(arms, folder, facts, seeds=3, train=train_in_process, progress=print)     # folder/race.json

Every arm is a run folder, made by `redline train` in a separate process, so that its start-up counts. The seeds take
turns: one run of each recipe, then the next seed. Finished runs are not repeated. An interrupted one starts over, because
its time would not be that of an unbroken run. What a figure means:

- *seconds* run from the command to the moment the loss was reached, validations included; between two validations the
  loss is taken to fall in a straight line. *Net* leaves the start-up out: everything up to the end of the first update
  but the time of an ordinary one.
- *joules* are those of the GPU from the start of the training loop on, by NVML; absent on a CPU.
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from redline.config.differences import data_of, unlike_data
from redline.config.load import build, from_toml, to_toml
from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError, Say, StorageError
from redline.launch.processes import ERROR, LAUNCHER, PROGRAM
from redline.machine.facts import MachineFacts, same_kind
from redline.measure.statistics import APART_SPREAD, difference
from redline.record.files import read_json, write_atomic
from redline.record.read import Run, number, read_run
from redline.record.units import DASH

RESULT = "race.json"
RUNGS = 6
"""About as many losses as a table can show; the final loss of every recipe is added to them."""
Train = Callable[[Path, Path, Path | None], str | None]
"""Trains the recipe in the first file to its end in the second folder, by the plan in the third if there is one; returns
why it could not."""


@dataclass(frozen=True)
class Arm:
    name: str
    recipe: Recipe
    plan: Path | None = None


@dataclass(frozen=True)
class Point:
    """Where a run stands at a loss."""

    loss: float
    seconds: float
    net_seconds: float
    tokens: float
    joules: float | None


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What an arm did, seed by seed."""

    name: str
    fingerprint: str
    curves: tuple[tuple[Point, ...], ...]
    """Of every seed that ended, its validations with a better loss than before."""
    start_up_s: tuple[float, ...]
    failed: tuple[str, ...]

    @property
    def final(self) -> list[float]:
        return [curve[-1].loss for curve in self.curves]

    def at(self, loss: float) -> list[Point]:
        """Of every seed that reached the loss, where it did."""
        return [point for curve in self.curves if (point := reached(curve, loss)) is not None]


@dataclass(frozen=True, kw_only=True)
class Result:
    machine: dict[str, Any]
    data: dict[str, Any]
    seeds: int
    rungs: tuple[float, ...]
    lanes: tuple[Lane, ...]


def race(
    arms: Sequence[Arm], folder: Path, facts: MachineFacts, *, seeds: int, train: Train, progress: Say
) -> Result:
    """Train every arm with every seed, and write what they reached."""
    check(arms)
    failed: dict[str, list[str]] = {arm.name: [] for arm in arms}
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    todo = [(arm, seed) for seed in range(seeds) for arm in arms]
    for place, (arm, seed) in enumerate(todo, 1):
        progress(f"{arm.name}, seed {seed} ({place} of {len(todo)})")
        found = trained(arm, folder / f"{arm.name}-seed-{seed}", seed, train)
        if isinstance(found, str):
            failed[arm.name].append(found)
            progress(f"  failed: {found}")
        else:
            runs[arm.name].append(found)
            last = curve_of(found)[-1]
            progress(f"  validation loss {last.loss:.4f} after {last.seconds:.0f} s")
    lanes = tuple(
        Lane(
            name=arm.name,
            fingerprint=arm.recipe.fingerprint,
            curves=tuple(curve_of(run) for run in runs[arm.name]),
            start_up_s=tuple(_start_up_s(run) for run in runs[arm.name]),
            failed=tuple(failed[arm.name]),
        )
        for arm in arms
    )
    result = Result(
        machine=asdict(facts), data=data_of(arms[0].recipe), seeds=seeds, rungs=ladder(lanes), lanes=lanes
    )
    write_atomic(folder / RESULT, json.dumps(asdict(result), indent=1) + "\n")
    return result


def check(arms: Sequence[Arm]) -> None:
    """Refuse arms whose losses say nothing about each other, and say why."""
    first = arms[0]
    for arm in arms:
        if arm.recipe.workload != "pretrain" or not arm.recipe.train.eval_every:
            raise ConfigError(
                f"{arm.name}: a race is between pretrain recipes that validate; give --set train.eval_every=N"
            )
        if unlike := unlike_data(first.recipe, arm.recipe):
            shown = ", ".join(f"{key} ({a} and {b})" for key, (a, b) in unlike.items())
            raise ConfigError(
                f"{first.name} and {arm.name} cannot race: their losses are of different data or validation sets:"
                f" {shown}; make them equal, for all recipes with --set"
            )
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError(f"two recipes of the race are the same: {', '.join(arm.name for arm in arms)}")


def trained(arm: Arm, folder: Path, seed: int, train: Train, *, resume: bool = False) -> Run | str:
    """The finished run of an arm and a seed; or why it failed. `resume`: its time does not count."""
    recipe = replace(arm.recipe, train=replace(arm.recipe.train, seed=seed))
    wanted, given = folder.with_name(f"{folder.name}.toml"), to_toml(recipe)
    if folder.exists() and not (wanted.exists() and wanted.read_text(encoding="utf-8") == given):
        raise StorageError(f"{folder} holds a run of another recipe: give another folder with --out")
    if not (folder.exists() and read_run(folder).state.ending == "finished"):
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(wanted, given)
        if (why := train(wanted, folder, arm.plan)) is not None:
            return why
    return read_run(folder)


def train_in_process(recipe: Path, run: Path, plan: Path | None) -> str | None:
    """`redline train` (for RFT and RL their `run`) in a process that ends with this one."""
    workload = from_toml(recipe.read_text(encoding="utf-8"), str(recipe)).workload
    verb = [workload, "run"] if workload in ("rft", "rl") else ["train"]
    command = [*PROGRAM, *verb, str(recipe), "--run", str(run), "--quiet"]
    command += ["--plan", str(plan)] if plan is not None else []
    environment = {**os.environ, LAUNCHER: str(os.getpid())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode and not last.startswith(ERROR):
        raise MachineError(
            f"`redline {' '.join(verb)} {recipe}` ended with exit code {done.returncode}: {last}"
        )
    return last.removeprefix(ERROR) if done.returncode else None


# ---- curves and the ladder ----


def curve_of(run: Run) -> tuple[Point, ...]:
    """The validations of a run that were better than all before."""
    start_up_s = _start_up_s(run)
    # which its own clock does not count
    before_loop_s = _to_first_update_s(run) - run.metrics[0]["elapsed_s"]
    metered = [line for line in run.metrics if number(line.get("energy_j")) is not None]
    clock_s, energy_j = ([line[name] for line in metered] for name in ("elapsed_s", "energy_j"))
    curve: list[Point] = []
    for line in run.metrics:
        loss = number(line.get("valid_loss"))
        if loss is not None and (not curve or loss < curve[-1].loss):
            seconds = before_loop_s + line["elapsed_s"]
            joules = float(np.interp(line["elapsed_s"], clock_s, energy_j)) if metered else None
            curve.append(Point(loss, seconds, seconds - start_up_s, line["tokens"], joules))
    return tuple(curve)


def _to_first_update_s(run: Run) -> float:
    """From the command to the end of the first update; without the event, what the loop itself took."""
    told = [event["total_s"] for event in run.events if event["event"] == "start_up"]
    return float(told[0] if told else run.metrics[0]["elapsed_s"])


def _start_up_s(run: Run) -> float:
    """The same, less the time of an ordinary update."""
    return max(0.0, _to_first_update_s(run) - (run.typical("step_s") or 0.0))


def reached(curve: Sequence[Point], loss: float) -> Point | None:
    """Where a run reached the loss: between the validation before and the first that is as low."""
    if not curve or curve[-1].loss > loss:
        return None

    def there(name: str) -> Any:
        values = [getattr(point, name) for point in curve]
        falling = [-point.loss for point in curve]
        return None if None in values else float(np.interp(-loss, falling, values))

    return Point(loss, *(there(name) for name in ("seconds", "net_seconds", "tokens", "joules")))


def ladder(lanes: Sequence[Lane]) -> tuple[float, ...]:
    """Losses to compare at, from high to low: round ones between the first loss that every lane validated and the
    lowest of all, and of every lane the loss that all of its seeds reached."""
    curves = [curve for lane in lanes for curve in lane.curves if curve]
    if not curves:
        return ()
    top, bottom = min(curve[0].loss for curve in curves), min(curve[-1].loss for curve in curves)
    rough = max(top - bottom, 1e-3) / RUNGS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    rounds = [round(step * n, 6) for n in range(math.ceil(bottom / step), math.floor(top / step) + 1)]
    finals = [_last(lane) for lane in lanes if lane.curves]
    return tuple(sorted({*rounds, *finals}, reverse=True))


def _last(lane: Lane) -> float:
    """The loss that all of its seeds reached, rounded up."""
    return math.ceil(max(lane.final) * 1000) / 1000


# ---- what it says ----

COLUMNS = ("loss", "recipe", "seeds", "seconds", "net", "M tokens", "kJ", "speed-up")


def rows(result: Result) -> list[tuple[str, ...]]:
    """A line for every loss and recipe; the speed-up is against the first recipe of the race."""
    table: list[tuple[str, ...]] = []
    for loss in result.rungs:
        base = [point.seconds for point in result.lanes[0].at(loss)]
        for lane in result.lanes:
            there = lane.at(loss)
            cells = [f"{loss:g}", lane.name, f"{len(there)} of {len(lane.curves) + len(lane.failed)}"]
            if not there:
                table.append((*cells, "not reached", "", "", "", ""))
                continue
            joules = [point.joules for point in there if point.joules is not None]
            faster = speed_up(base, [p.seconds for p in there]) if lane is not result.lanes[0] else ""
            table.append((
                *cells,
                _spread([p.seconds for p in there], "{:,.1f}"),
                _spread([p.net_seconds for p in there], "{:,.1f}"),
                _spread([p.tokens / 1e6 for p in there], "{:,.2f}"),
                _spread([j / 1e3 for j in joules], "{:,.1f}") if joules else DASH,
                faster,
            ))  # fmt: skip
    return table


def speed_up(base_s: Sequence[float], other_s: Sequence[float]) -> str:
    """How many times faster, with a 90 % interval over the seeds."""
    if not base_s:
        return "only here"
    found = difference([math.log(s) for s in other_s], [math.log(s) for s in base_s])
    if found.low == -math.inf:
        return f"{math.exp(found.mean):.2f}x (one seed: no interval)"
    return f"{math.exp(found.mean):.2f}x [{math.exp(found.low):.2f}, {math.exp(found.high):.2f}]"


def _spread(values: Sequence[float], form: str) -> str:
    middle = form.format(median(values))
    lowest, highest = form.format(min(values)), form.format(max(values))
    return middle if lowest == highest else f"{middle} [{lowest}, {highest}]"


# ---- the gate ----


def slower_than(result: Result, recorded: Path) -> list[str]:
    """What is slower than in a recorded race on the same kind of machine, beyond the interval over the seeds; refuses a
    record that cannot be compared."""
    try:
        before = build(Result, read_json(recorded, dict, error=ConfigError), where="it")
    except ConfigError as error:
        raise ConfigError(
            f"{recorded} is not the race.json of a race ({error}): give one with --against"
        ) from error
    if not same_kind(before.machine, result.machine):
        raise ConfigError(f"{recorded} was made on another kind of machine: record one here first")
    if before.data != result.data:
        raise ConfigError(
            f"{recorded} is of other data or another validation set: record a race on this one first"
        )
    then = {lane.name: lane for lane in before.lanes if lane.curves}
    both = [(lane, then[lane.name]) for lane in result.lanes if lane.name in then]
    if not both:
        raise ConfigError(f"{recorded} holds none of these recipes: give the record of a race between them")
    return [why for pair in both if (why := _slower(*pair, before.rungs))]


def _slower(now: Lane, then: Lane, rungs: Sequence[float]) -> str:
    """Judged at the lowest loss that all seeds of the record reached."""
    loss = min(rung for rung in (*rungs, _last(then)) if len(then.at(rung)) == len(then.curves))
    before, here = ([math.log(p.seconds) for p in lane.at(loss)] for lane in (then, now))
    if len(here) < len(now.curves) or not here:
        return f"{now.name} reached a loss of {loss:g} with {len(here)} of {len(now.curves)} seeds, then with all"
    found = difference(before, here)
    if found.low <= math.log1p(APART_SPREAD):
        return ""
    return f"{now.name} takes {math.exp(found.mean):.2f}x the time to a loss of {loss:g}, at least {math.exp(found.low):.2f}x"
