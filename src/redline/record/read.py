"""Reading a run folder: the one reader behind report, watch, diagnose and compare. No torch.

    run = read_run(Path("runs/nano"))
    run.metrics[-1]["loss"], run.plan["micro_batch"]["reason"], run.state.text, run.speed.value

What the figures mean, wherever they are shown:

- An *attempt* begins with each event `start` or `resume`.
- *Warm* updates are all but the first WARM_UP of every attempt (of a short attempt, its first third): those
  compile, allocate, and find the loader's queue full.
- The *speed* of a run is the median of `tokens_per_s` (`rows_per_s` if there are no tokens) over its warm updates.
  Its interval is the lowest and highest median of six consecutive blocks of them.
- The *whole-run speed* is all tokens over all training time, with compilation, validations and checkpoints.

What a folder does not hold is empty; what cannot be read is an error of one line. The plan stays plain JSON, because
watched loops have plans too. Left out: checkpoints, and samples.db (rft/store.py).
"""

import math
import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from os.path import exists  # unlike Path's it never raises; reading the file says why it cannot be read
from pathlib import Path
from statistics import median, median_low
from typing import Any, Literal

from redline.config.load import from_toml, parse
from redline.config.recipe import Recipe
from redline.errors import ConfigError, DataError
from redline.record.files import T, parse_json, read_text
from redline.record.run import RunFolder, lost_owner, read_lines
from redline.record.units import format_duration

WARM_UP = 5
BLOCKS = 6
SILENT_AFTER_S = 60.0
"""With no line for this long, and for ten updates, the process may be gone: a killed run cannot record its end."""
RECORDS = ("recipe.toml", "metrics.jsonl", "events.jsonl", "ablation.json", "trials.jsonl")
"""A run folder has one of these."""
METRICS = ("metrics.jsonl", "train-samples/metrics.jsonl", "train-answers/metrics.jsonl")
GROWING = (*METRICS, "events.jsonl", "samples.db", "samples.db-wal", "recipe.toml")
"""What a running run writes; new samples are in the WAL until SQLite moves them into the database."""

Line = dict[str, Any]
Ending = Literal[
    "finished", "stopped", "failed", "killed", "between stages", "running", "no end recorded", "no training"
]


@dataclass(frozen=True)
class State:
    ending: Ending
    text: str

    def __str__(self) -> str:
        """`finished`, `stopped by signal`, `failed: out of memory`."""
        return self.text if self.text.startswith(self.ending) else f"{self.ending}: {self.text}"

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.ending in ("finished", "stopped", "failed", "killed")


@dataclass(frozen=True)
class Measured:
    """A median over updates, and the interval of its block medians if there are enough for six blocks."""

    value: float
    low: float | None
    high: float | None
    updates: int


@dataclass(frozen=True, kw_only=True)
class Run:
    path: Path
    label: str
    """Names the run among several."""
    recipe: dict[str, Any]
    recipe_text: str
    plan: dict[str, Any]
    metrics: list[Line]
    """One line per update, each with a step; for an RFT run, of the fine-tuning on its samples."""
    events: list[Line]
    evaluations: list[Line]
    ablation: list[Line]
    silent_s: float
    """Time since the last line, when the folder was read."""
    lost: int | None = None
    """The process that wrote the run, if it was gone before the folder was read and did not leave it."""

    @property
    def workload(self) -> str:
        return str(self.recipe.get("workload", "pretrain"))

    @property
    def hardware(self) -> Line:
        return table(self.plan.get("hardware"))

    @property
    def prediction(self) -> Line:
        return table(self.plan.get("prediction"))

    @property
    def on_gpu(self) -> bool:
        """Whether its plan, or if it has stages the last of them, ran on a GPU."""
        kind, stages = self.hardware.get("kind"), self.told("stage")
        return kind == "cuda" if kind else not stages or bool(stages[-1].get("on_gpu"))

    @property
    def name(self) -> str:
        return str(self.recipe.get("name", self.label))

    @cached_property
    def fingerprint(self) -> str | None:
        """What was computed: losses are comparable only if it is the same."""
        return self.typed.fingerprint if self.typed else None

    @cached_property
    def work(self) -> str | None:
        """The work of one update: speeds are comparable only if it is the same."""
        planned = self.plan.get("work")
        return planned if isinstance(planned, str) else self.typed.work if self.typed else None

    @cached_property
    def typed(self) -> Recipe | None:
        try:
            return from_toml(self.recipe_text, where="recipe.toml")
        except ConfigError:  # none, or one of another version
            return None

    @cached_property
    def state(self) -> State:
        known = _rft_state(self.events, self.evaluations) if self.workload == "rft" else _state(self.events)
        # After running out of memory the launcher starts the next process.
        if known is None and self.lost and [e["event"] for e in self.events[-1:]] != ["out_of_memory"]:
            gone = f"process {self.lost} is gone without recording an end: killed, or crashed"
            return State("killed", gone)
        if not self.metrics and not self.events and self.workload == "pretrain":
            return State("no training", "no update and no event is recorded in this folder")
        if known is not None and (known.ending != "between stages" or self.silent_s > SILENT_AFTER_S):
            return known
        told = f"{known.text}; " if known is not None else ""
        recent = values(self.metrics[-20:], "step_s")
        if self.silent_s <= max(SILENT_AFTER_S, 10 * median(recent) if recent else 0.0):
            return State("running", f"{told}last line {format_duration(round(self.silent_s))} ago")
        ago = f"last line {format_duration(self.silent_s)} ago"
        return State("no end recorded", f"{ago}; killed, or on a machine whose clock differs")

    def told(self, kind: str) -> list[Line]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def attempts(self) -> list[Line]:
        return attempts(self.events)

    @property
    def planned_updates(self) -> int | None:
        """Planned updates, as the last attempt counted them, else the last stage that these metrics are of, else the recipe."""
        counted, shown = values(self.attempts[-1:], "updates"), metrics_path(self.path).parent.name
        staged = values(
            [stage for stage in self.told("stage") if stage.get("name") == shown][-1:], "total_steps"
        )
        told = (*counted, *staged, *values([table(self.recipe.get("train"))], "steps"))
        return next((int(value) for value in told if value > 0), None)

    @cached_property
    def warm(self) -> list[Line]:
        """The updates that speeds are measured over."""
        begun = sorted({0, *(int(number(event.get("step")) or 0) for event in self.attempts)})
        groups = groupby(self.metrics, key=lambda line: bisect_left(begun, line["step"]))
        attempts = [list(group) for _, group in groups]
        return [line for lines in attempts for line in lines[min(WARM_UP, len(lines) // 3) :]]

    def typical(self, name: str) -> float | None:
        """Median of a metric over the warm updates."""
        found = values(self.warm, name)
        return median(found) if found else None

    @property
    def rate(self) -> str:
        """The metric that is the run's speed."""
        return "tokens_per_s" if values(self.warm, "tokens_per_s") else "rows_per_s"

    @cached_property
    def speed(self) -> Measured | None:
        return measured(values(self.warm, self.rate))

    @property
    def whole_run_speed(self) -> float | None:
        tokens = values(self.metrics[-1:], "tokens")
        return tokens[0] / self.elapsed_s if self.elapsed_s and tokens and tokens[0] else None

    @property
    def elapsed_s(self) -> float | None:
        """Training time of the run, validations and checkpoints included."""
        last = [*self.told("end")[-1:], *self.metrics[-1:]]
        return max(values(last, "elapsed_s"), default=None)

    @cached_property
    def holes(self) -> list[tuple[int, int]]:
        return holes(self.metrics, begin=first_step(self.events))


def read_run(path: Path) -> Run:
    """Everything in the folder; refuses a folder that is not a run's."""
    lost = lost_owner(path)  # first, so that all that it wrote is there
    recipe_path = path / "recipe.toml"
    recipe = read_text(recipe_path, missing="")
    if not any(exists(path / name) for name in RECORDS):
        missing = "it has no recipe.toml and no metrics.jsonl"
        raise DataError(f"{path} is not a run folder ({missing}): give one of `redline train` or `rft run`")
    metrics, events = read_lines(metrics_path(path)), read_lines(RunFolder(path).events_path)
    if exists(recipe_path) and not recipe.strip() and (metrics or events):
        raise DataError(f"{recipe_path} is empty, so nothing tells what the run is: put its recipe back")
    return Run(
        path=path,
        label=path.resolve().name,
        recipe=parse(recipe, where=str(recipe_path)),
        recipe_text=recipe,
        plan=_json(path / "plan.json", dict),
        metrics=metrics,
        events=events,
        evaluations=read_lines(path / "evaluations.jsonl"),
        ablation=[row for row in _json(path / "ablation.json", list) if isinstance(row, dict)],
        silent_s=silent_s(path),
        lost=lost,
    )


def read_runs(paths: list[Path]) -> list[Run]:
    """Several runs, labelled by their folders' names, or by their paths if two share a name."""
    runs = [read_run(path) for path in paths]
    if len({run.label for run in runs}) == len(runs):
        return runs
    return [replace(run, label=str(run.path)) for run in runs]


def rounds_of(folder: Path) -> list[Path]:
    """The rounds of an RFT run that has several, in their order."""
    if exists(folder / "recipe.toml"):
        return []
    found = [path for path in folder.glob("round-*") if exists(path / "recipe.toml")]
    numbered = [(int(n), path) for path in found if (n := path.name.removeprefix("round-")).isdecimal()]
    return [path for _, path in sorted(numbered)]


def metrics_path(run: Path) -> Path:
    """The metrics of the folder itself, or of an RFT run's fine-tuning."""
    return next((run / place for place in METRICS if exists(run / place)), run / METRICS[0])


# ---- values of a record, whatever it holds ----


LARGEST = 1e60
"""Anything larger is damage: fp32 ends at 3e38. Means and variances of larger numbers would overflow."""


def number(value: Any) -> float | None:
    """A number of at most LARGEST, or None for anything else. One smaller than 1 / LARGEST is 0."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not abs(value) <= LARGEST:
        return None
    return float(value) if abs(value) >= 1 / LARGEST else 0.0


def table(value: Any) -> dict[str, Any]:
    """A table of a record; empty for anything else."""
    return value if isinstance(value, dict) else {}


def total(events: list[Line], kind: str, name: str = "elapsed_s") -> float:
    """The sum of a number over the events of a kind."""
    return sum(values([event for event in events if event["event"] == kind], name))


def values(lines: list[Line], name: str) -> list[float]:
    """The numbers that the lines hold for a metric, in order."""
    return [value for line in lines if (value := number(line.get(name))) is not None]


# ---- definitions ----


def measured(found: list[float]) -> Measured | None:
    """Median and interval of values in the order of time."""
    if not found:
        return None
    low = high = None
    if len(found) >= BLOCKS * 2:
        edges = [len(found) * i // BLOCKS for i in range(BLOCKS + 1)]
        blocks = [median(found[a:b]) for a, b in pairwise(edges)]
        low, high = min(blocks), max(blocks)
    return Measured(median(found), low, high, len(found))


def attempts(events: list[Line]) -> list[Line]:
    return [event for event in events if event["event"] in ("start", "resume")]


def first_step(events: list[Line]) -> int:
    """The updates that a run began with: for a fork, those of its parent."""
    return int(min(values(attempts(events), "step"), default=0))


def before_fork_s(events: list[Line], elapsed_s: float | None, step_s: float | None) -> float:
    """The training time of the run that this one was forked from, which it goes on counting; by its first line's times."""
    return (elapsed_s or 0.0) - (step_s or 0.0) if first_step(events) else 0.0


def lost_updates(folder: RunFolder, step: int) -> list[tuple[int, int]]:
    """The holes in the record of a run that resumes from a checkpoint of this step; none for a new run."""
    events = read_lines(folder.events_path)
    begun = first_step(events) if attempts(events) else step
    return holes(read_lines(folder.metrics_path), step, begun)


def holes(lines: list[Line], end: int | None = None, begin: int = 0) -> list[tuple[int, int]]:
    """Updates missing from the record, as (first, last): after `begin`, between its lines, and up to `end`, which a
    checkpoint has reached. A record of every Nth update has no holes."""
    if not lines:
        return [(begin + 1, end)] if end and end > begin else []
    steps = [begin, *(line["step"] for line in lines), *(() if end is None else (end + 1,))]
    usual = median_low([after - before for before, after in pairwise(steps)])
    return [(before + 1, after - 1) for before, after in pairwise(steps) if after - before > max(1, usual)]


def time_left_s(recent: list[Line], total_steps: float | None, max_hours: float | None) -> float | None:
    """Time left by the median of recent updates, which no checkpoint moves. None if the run has no planned end."""
    step_s = values(recent, "step_s")
    if not step_s or not (total_steps or max_hours):
        return None
    by_steps_s = (total_steps - recent[-1]["step"]) * median(step_s) if total_steps else math.inf
    spent_s = number(recent[-1].get("elapsed_s")) or 0.0
    by_hours_s = max_hours * 3600 - spent_s if max_hours else math.inf
    return max(0.0, min(by_steps_s, by_hours_s))


def silent_s(path: Path) -> float:
    last = max(((path / name).stat().st_mtime for name in GROWING if exists(path / name)), default=0.0)
    return max(0.0, time.time() - last)


def _state(events: list[Line]) -> State | None:
    """The state by the last event that shows one."""
    for event in reversed(events):
        kind, why = event["event"], str(event.get("why", ""))
        if kind == "end":
            return State("stopped" if why.startswith("stopped by") else "finished", why)
        if kind == "failed":
            return State("failed", str(event.get("error", "failed")))
        if kind in ("start", "resume"):
            break
    return None


_STAGES = {
    "sampling_end": "sampling",
    "training_on_samples": "fine-tuning on samples",
    "training_on_answers": "fine-tuning on answers",
}


def _rft_state(events: list[Line], evaluations: list[Line]) -> State | None:
    """The stages of an RFT run end one by one; the last is the test of what was trained."""
    last = events[-1] if events else {}
    if last.get("event") == "failed":
        return State("failed", str(last.get("error", "failed")))
    since = number(last.get("at")) or 0
    tested = [line for line in evaluations if line.get("weights") != "base"]
    if any((number(line.get("at")) or 0) >= since for line in tested):
        return State("finished", "tested after fine-tuning")
    if (stage := _STAGES.get(str(last.get("event")))) is None:
        return None
    why = str(last.get("why", ""))
    return State("between stages" if why == "finished" else "stopped", f"{stage}: {why}")


def _json(path: Path, kind: type[T]) -> T:
    text = read_text(path, missing="")
    return parse_json(text, path, kind) if text else kind()
