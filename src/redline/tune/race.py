"""The race: recipes trained on the same data, and how long each takes to each validation loss. No torch.

    arms = [Arm("muon", muon), Arm("adamw", adamw)]
    result = race(arms, folder, facts, seeds=3, train=train_in_process, progress=print)     # folder/race.json

Every arm is a run folder, made by `redline train` in a separate process, so that its start-up counts. The seeds take
turns: one run of each recipe, then the next seed. Finished runs are not repeated. An interrupted one starts over, because
its time would not be that of an unbroken run. What a figure means:

- *seconds* run from the command to the moment the loss was reached, validations included; between two validations the
  loss is assumed to fall in a straight line. *Net* leaves the start-up out: everything up to the end of the first update
  except the time of an ordinary one.
- *joules* are those of the GPU from the start of the training loop on, by NVML; absent on a CPU.
"""

import json
import math
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from redline.config.differences import data_of, unlike_data
from redline.config.load import from_toml, to_toml
from redline.config.recipe import Recipe, fingerprint_of
from redline.errors import ConfigError, MachineError, RedlineError, Say, StorageError
from redline.launch.processes import ERROR, LAUNCHER, PROGRAM
from redline.machine.facts import MachineFacts
from redline.measure.statistics import difference
from redline.record.files import write_atomic
from redline.record.read import Line, Run, metrics_path, number, read_run
from redline.record.run import read_lines
from redline.record.units import DASH, format_duration

RESULT = "race.json"
RUNGS = 6
"""About as many losses as a table can show; the final loss of every recipe is added to them."""
TELL_EVERY_S = 10.0
LONGEST_NAME = 200
"""Bytes of a run folder's name without its seed. File systems hold 255, the ending of a temporary file included."""
Train = Callable[[Path, Path, Path | None], str | None]
"""Trains the recipe in the first file to its end in the second folder, by the plan in the third if there is one; returns
why it could not."""


@dataclass(frozen=True)
class Arm:
    name: str
    recipe: Recipe
    plan: Path | None = None

    def place(self, folder: Path, seed: int) -> Path:
        """The folder of a run: the name without what a folder's cannot have. If it is too long, its beginning and a hash of
        all of it."""
        name = re.sub(r"[^\w.=+-]+", "-", self.name).strip("-.")
        if len(long := name.encode()) > LONGEST_NAME:
            tail = f"-{fingerprint_of(self.name)[:8]}"
            name = long[: LONGEST_NAME - len(tail)].decode(errors="ignore") + tail
        return folder / f"{name}-seed-{seed}"


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
    """The validations of every seed that ended."""
    start_up_s: tuple[float, ...]
    failed: tuple[str, ...]
    target: float | None = None
    """The loss that its runs end at, if they get there."""

    @property
    def seeds(self) -> int:
        return len(self.curves) + len(self.failed)

    @property
    def lowest(self) -> list[float]:
        return [min(point.loss for point in curve) for curve in self.curves]

    def at(self, loss: float) -> list[Point]:
        """Where each seed that reached the loss did so."""
        return [point for curve in self.curves if (point := reached(curve, loss)) is not None]

    def at_most(self, loss: float) -> bool:
        """Whether a seed was below the loss by its first validation: when it got there is not known."""
        return any(curve[0].loss < loss for curve in self.curves)


@dataclass(frozen=True, kw_only=True)
class Result:
    machine: dict[str, Any]
    data: dict[str, Any]
    seeds: int
    rungs: tuple[float, ...]
    lanes: tuple[Lane, ...]
    tokens: str | None = None
    """Fingerprint of the data that all runs trained and validated on."""
    note: str = ""
    """What whoever publishes the file adds to it."""


def race(
    arms: Sequence[Arm], folder: Path, facts: MachineFacts, *, seeds: int, train: Train, progress: Say
) -> Result:
    """Train every arm with every seed, and write what they reached."""
    check(arms)
    failed: dict[str, list[str]] = {arm.name: [] for arm in arms}
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    finished: list[Run] = []
    todo = [(arm, seed) for seed in range(seeds) for arm in arms]
    for place, (arm, seed) in enumerate(todo, 1):
        progress(f"{arm.name}, seed {seed} ({place} of {len(todo)})")
        found = trained(arm, arm.place(folder, seed), seed, train)
        if isinstance(found, str):
            failed[arm.name].append(found)
            progress(f"  failed: {found}")
        else:
            runs[arm.name].append(found)
            finished.append(found)
            _check_alike(finished[0], found)
            last = curve_of(found)[-1]
            progress(f"  validation loss {last.loss:.4f} after {last.seconds:.0f} s")
    lanes = tuple(
        Lane(
            name=arm.name,
            fingerprint=arm.recipe.fingerprint,
            curves=tuple(curve_of(run) for run in runs[arm.name]),
            start_up_s=tuple(_start_up_s(run) for run in runs[arm.name]),
            failed=tuple(failed[arm.name]),
            target=arm.recipe.train.target_loss,
        )
        for arm in arms
    )
    result = Result(
        machine=asdict(facts), data=data_of(arms[0].recipe), seeds=seeds, rungs=ladder(lanes), lanes=lanes,
        tokens=_tokens(finished[0]) if finished else None,
    )  # fmt: skip
    write_atomic(folder / RESULT, json.dumps(asdict(result), indent=1) + "\n")
    return result


def check(arms: Sequence[Arm]) -> None:
    """Refuse arms whose losses say nothing about each other, and say why."""
    first = arms[0]
    for arm in arms:
        if (workload := arm.recipe.workload) != "pretrain":
            raise ConfigError(f"{arm.name}: a race needs pretrain recipes, got workload {workload}")
        if not arm.recipe.train.eval_every:
            raise ConfigError(f"{arm.name}: a race needs validations: give --set train.eval_every=N")
        if unlike := unlike_data(first.recipe, arm.recipe):
            shown = ", ".join(f"{key} ({a} and {b})" for key, (a, b) in unlike.items())
            raise ConfigError(
                f"{first.name} and {arm.name} cannot race: their losses are on different data or validation sets:"
                f" {shown}; make them equal, for all recipes with --set"
            )
    if len({arm.place(Path(), 0) for arm in arms}) < len(arms):
        raise ConfigError(f"two recipes of the race are the same: {', '.join(arm.name for arm in arms)}")


def _check_alike(first: Run, last: Run) -> None:
    """Refuse a run kept from another machine, or from before the data changed: its times or losses do not compare."""
    for what, of in (("hardware", lambda run: run.hardware.get("title")), ("tokens", _tokens)):
        if of(first) != of(last):
            raise StorageError(
                f"{first.path} and {last.path} ran on different {what} ({of(first)} and {of(last)}): delete the older"
                " one and run the same command again, or give another folder with --out"
            )


def _tokens(run: Run) -> str | None:
    """The fingerprint of the data that a run read."""
    return next((event.get("data") for event in run.told("start")), None)


def trained(arm: Arm, folder: Path, seed: int, train: Train, *, resume: bool = False) -> Run | str:
    """The finished run of an arm and a seed; or why it failed. `resume`: its time does not count."""
    recipe = replace(arm.recipe, train=replace(arm.recipe.train, seed=seed))
    wanted, given = folder.with_name(f"{folder.name}.toml"), to_toml(recipe)
    begun = folder / "recipe.toml"  # a run that was copied has only this
    held = next((path.read_text(encoding="utf-8") for path in (wanted, begun) if path.exists()), None)
    if folder.exists() and held != given:
        raise StorageError(f"{folder} holds a run of another recipe: give another folder with --out")
    if not (begun.exists() and read_run(folder).state.ending == "finished"):
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(wanted, given)
        if (why := train(wanted, folder, arm.plan)) is not None:
            return why
    run = read_run(folder)
    if run.state.ending == "stopped":  # by a signal sent to it alone
        raise MachineError(f"{folder} was interrupted ({run.state.text}): run the same command again")
    return run


def train_in_process(
    recipe: Path, run: Path, plan: Path | None, *, progress: Say = lambda text: None
) -> str | None:
    """`redline train` (for RFT and RL their `run`) in a process that ends with this one. `progress` is told every
    TELL_EVERY_S where it stands."""
    workload = from_toml(recipe.read_text(encoding="utf-8"), str(recipe)).workload
    verb = [workload, "run"] if workload in ("rft", "rl") else ["train"]
    command = [*PROGRAM, *verb, str(recipe), "--run", str(run), "--quiet"]
    command += ["--plan", str(plan)] if plan is not None else []
    environment = {**os.environ, LAUNCHER: str(os.getpid())}
    with _told(run, progress):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if not done.returncode:
        return None
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if last.startswith(ERROR):
        return last.removeprefix(ERROR)
    return f"`redline {' '.join(verb)}` ended with exit code {done.returncode}: {last}"


@contextmanager
def _told(run: Path, progress: Say) -> Iterator[None]:
    over = threading.Event()

    def tell() -> None:
        while not over.wait(TELL_EVERY_S):
            # between two writes a file may be anything; the reading of the finished run judges it
            with suppress(RedlineError):
                if lines := read_lines(metrics_path(run)):
                    progress(f"  {standing(lines[-1])}")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def standing(line: Line) -> str:
    """A line of metrics in a few words."""
    loss, elapsed_s = number(line.get("loss")), number(line.get("elapsed_s"))
    parts = [f"step {line['step']:,}", f"loss {loss:.3f}" if loss is not None else ""]
    return ", ".join(filter(None, [*parts, format_duration(elapsed_s) if elapsed_s is not None else ""]))


# ---- curves and the ladder ----


def curve_of(run: Run) -> tuple[Point, ...]:
    """The validations of a run."""
    start_up_s = _start_up_s(run)
    # which its own clock does not count
    before_loop_s = _to_first_update_s(run) - run.metrics[0]["elapsed_s"]
    metered = [line for line in run.metrics if number(line.get("energy_j")) is not None]
    clock_s, energy_j = ([line[name] for line in metered] for name in ("elapsed_s", "energy_j"))
    curve: list[Point] = []
    for line in run.metrics:
        if (loss := number(line.get("valid_loss"))) is not None:
            seconds = before_loop_s + line["elapsed_s"]
            joules = _joules(clock_s, energy_j, line["elapsed_s"]) if metered else None
            curve.append(Point(loss, seconds, seconds - start_up_s, line["tokens"], joules))
    return tuple(curve)


def _joules(clock_s: Sequence[float], energy_j: Sequence[float], at_s: float) -> float:
    """In a straight line between readings; beyond the last, which may be a second old, at the mean power so far."""
    beyond_s = max(0.0, at_s - clock_s[-1])
    return float(np.interp(at_s, clock_s, energy_j)) + beyond_s * energy_j[-1] / clock_s[-1]


def _to_first_update_s(run: Run) -> float:
    """Time from the command to the end of the first update; without the event, what the loop itself took."""
    told = [event["total_s"] for event in run.events if event["event"] == "start_up"]
    return float(told[0] if told else run.metrics[0]["elapsed_s"])


def _start_up_s(run: Run) -> float:
    """The start-up: the same, less the time of an ordinary update."""
    return max(0.0, _to_first_update_s(run) - (run.typical("step_s") or 0.0))


def reached(curve: Sequence[Point], loss: float) -> Point | None:
    """Where a run reached the loss: between the first validation that is as low and the one before; if there is none
    before, at that validation."""
    place = next((place for place, point in enumerate(curve) if point.loss <= loss), None)
    if place is None:
        return None
    before, after = curve[max(0, place - 1)], curve[place]
    share = (before.loss - loss) / (before.loss - after.loss) if place else 1.0

    def there(name: str) -> Any:
        ends = [getattr(point, name) for point in (before, after)]
        return None if None in ends else ends[0] + share * (ends[1] - ends[0])

    return Point(loss, *(there(name) for name in ("seconds", "net_seconds", "tokens", "joules")))


def ladder(lanes: Sequence[Lane]) -> tuple[float, ...]:
    """Losses to compare at, from high to low: round ones between the first loss that every lane validated and the
    lowest of all, the loss that all seeds of each lane reached, and the targets."""
    if not any(lane.curves for lane in lanes):
        return ()
    top = min(curve[0].loss for lane in lanes for curve in lane.curves)
    bottom = min(loss for lane in lanes for loss in lane.lowest)
    rough = max(top - bottom, 1e-3) / RUNGS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    rounds = [round(step * n, 6) for n in range(math.ceil(bottom / step), math.floor(top / step) + 1)]
    ends = [lowest_of_all(lane) for lane in lanes if lane.curves]
    targets = [lane.target for lane in lanes if lane.target is not None]
    # below its target a run says nothing: it ended there
    floor = min(targets) if len(targets) == len(lanes) else -math.inf
    return tuple(sorted((rung for rung in {*rounds, *ends, *targets} if rung >= floor), reverse=True))


def lowest_of_all(lane: Lane) -> float:
    """The loss that all of its seeds reached, rounded up."""
    return math.ceil(max(lane.lowest) * 1000) / 1000


# ---- what it says ----

AT_MOST, AT_LEAST = "≤ ", "≥ "
COLUMNS = ("loss", "recipe", "seeds", "seconds", "net", "M tokens", "kJ", "speed-up")


def rows(result: Result) -> list[tuple[str, ...]]:
    """A line for every loss and recipe; the speed-up is against the first recipe of the race."""
    table: list[tuple[str, ...]] = []
    for loss in result.rungs:
        base = result.lanes[0]
        for lane in result.lanes:
            there = lane.at(loss)
            cells = [f"{loss:g}", lane.name, f"{len(there)} of {lane.seeds}"]
            if not there:
                table.append((*cells, "not reached", "", "", "", ""))
                continue
            joules = [point.joules for point in there if point.joules is not None]
            sign = AT_MOST if lane.at_most(loss) else ""
            table.append((
                *cells,
                sign + _spread([p.seconds for p in there], "{:,.1f}"),
                sign + _spread([p.net_seconds for p in there], "{:,.1f}"),
                sign + _spread([p.tokens / 1e6 for p in there], "{:,.3f}"),
                sign + _spread([j / 1e3 for j in joules], "{:,.1f}") if joules else DASH,
                speed_up(base, lane, loss) if lane is not base else "",
            ))  # fmt: skip
    return table


def speed_up(base: Lane, other: Lane, loss: float) -> str:
    """How many times faster, with a 90% interval over the seeds. Left out if some seeds did not get there, because
    those that did are the quick ones."""
    before, here = ([math.log(point.seconds) for point in lane.at(loss)] for lane in (base, other))
    if not before:
        return "only here"
    sooner = (base.at_most(loss), other.at_most(loss))
    if all(sooner) or len(before) < base.seeds or len(here) < other.seeds:
        return DASH
    sign = {(True, False): AT_MOST, (False, True): AT_LEAST}.get(sooner, "")
    found = difference(here, before)
    if found.low == -math.inf:
        return f"{sign}{math.exp(found.mean):.2f}x (one seed: no interval)"
    return f"{sign}{math.exp(found.mean):.2f}x [{math.exp(found.low):.2f}, {math.exp(found.high):.2f}]"


def ends_apart(base: Lane, other: Lane) -> str:
    """How much higher the second ends than the first, with a 90% interval over the seeds; empty if either has no run."""
    if not base.curves or not other.curves:
        return ""
    found = difference(base.lowest, other.lowest)
    if found.low == -math.inf:
        return f"{found.mean:+.4f} (one seed: no interval)"
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def _spread(values: Sequence[float], form: str) -> str:
    middle = form.format(median(values))
    lowest, highest = form.format(min(values)), form.format(max(values))
    return middle if lowest == highest else f"{middle} [{lowest}, {highest}]"
