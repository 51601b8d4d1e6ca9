"""Reading a run folder: everything that the report shows, as it stands there. No torch.

    run = read_run(Path("runs/nano"))
    run.plan["micro_batch"]["reason"], run.metrics[-1]["loss"], run.state

The plan is read as plain JSON and not through `plan.load`: a report must open runs of other versions, whose
plans had other values. What a folder does not hold is empty. Left out: checkpoints, and the samples
themselves (their statistics are here).
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from redline.config.load import from_toml, parse
from redline.config.rft import fingerprint_of
from redline.errors import ConfigError, DataError
from redline.record.run import RunFolder, read_lines
from redline.record.units import format_duration

Ending = Literal[
    "finished", "stopped", "failed", "between stages", "running", "no end recorded", "no training"
]
SAMPLES = ("samples.db", "samples.db-wal")
"""What is sampled stands in the second until SQLite puts it into the first."""
SILENT_AFTER_S = 60.0
"""No line for this long, and for ten updates: the process may be gone. A run that is killed cannot record its
end."""


@dataclass(frozen=True)
class State:
    ending: Ending
    text: str

    @property
    def over(self) -> bool:
        """Whether the record says that the run has ended."""
        return self.ending in ("finished", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class Run:
    path: Path
    label: str
    """Names the run on a page that may show several."""
    workload: Literal["pretrain", "rft"]
    recipe: dict[str, Any]
    recipe_text: str
    plan: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One line per update, each with a step; of an RFT run those of the fine-tuning on its samples."""
    events: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: dict[str, Any] | None
    """Statistics of samples.db, as `redline rft stats --json` prints them."""
    trials: list[dict[str, Any]]
    tuning: list[dict[str, Any]]
    """The table that a finished tuning left."""
    ablation: list[dict[str, Any]]
    silent_s: float
    """Time since the last line was written, when the folder was read."""

    @property
    def name(self) -> str:
        return str(self.recipe.get("name", self.label))

    @property
    def fingerprint(self) -> str | None:
        """What was computed; two speeds compare only under the same one."""
        if isinstance(known := self.plan.get("fingerprint"), str):
            return known
        if self.workload == "pretrain":
            try:
                return from_toml(self.recipe_text, where="recipe.toml").fingerprint
            except ConfigError:  # none, or of another version
                pass
        what = {
            name: table
            for name, table in self.recipe.items()
            if name not in ("name", "about", "plan", "test")
        }
        return fingerprint_of(what) if what else None

    @property
    def state(self) -> State:
        if not self.metrics and not self.events and self.workload == "pretrain":
            return State("no training", "no update and no event is recorded in this folder")
        known = _rft_state(self.events, self.evaluations) if self.workload == "rft" else _state(self.events)
        if known is not None and (known.ending != "between stages" or self.silent_s > SILENT_AFTER_S):
            return known
        told = f"{known.text}; " if known is not None else ""
        if self.silent_s <= silence_limit_s(self.metrics):
            return State("running", f"{told}last line {format_duration(round(self.silent_s))} ago")
        return State(
            "no end recorded",
            f"last line {format_duration(self.silent_s)} ago; killed, or on a machine whose clock differs",
        )


def read_run(path: Path) -> Run:
    """Everything in the folder that a report needs; refuses a folder that is no run's."""
    folder = RunFolder(path)
    if not path.is_dir():
        raise DataError(
            f"no run folder at {path}: give the folder that `redline train --run` or `redline rft run --run`"
            " wrote"
        )
    if not any(
        known.exists()
        for known in (folder.recipe_path, folder.metrics_path, path / "ablation.json", path / "trials.jsonl")
    ):
        raise DataError(
            f"{path} is no run folder: it holds no recipe.toml and no metrics.jsonl; give the folder of a run"
        )
    text = _text(folder.recipe_path)
    recipe = parse(text, where=str(folder.recipe_path))
    return Run(
        path=path,
        label=path.resolve().name,
        workload="rft" if "task" in recipe else "pretrain",
        recipe=recipe,
        recipe_text=text,
        plan=_json(folder.plan_path, dict) or {},
        metrics=with_step(read_lines(metrics_path(path))),
        events=read_lines(folder.events_path),
        evaluations=read_lines(path / "evaluations.jsonl"),
        samples=_samples(path),
        trials=read_lines(path / "trials.jsonl"),
        tuning=_tuning(path),
        ablation=_rows(_json(path / "ablation.json", list)),
        silent_s=silent_s(path),
    )


def read_runs(paths: list[Path]) -> list[Run]:
    """Several runs, told apart by their folders' names, or by their paths where two folders have the same
    name."""
    runs = [read_run(path) for path in paths]
    names = [run.label for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [Run(**{**vars(run), "label": str(run.path)}) for run in runs]


def metrics_path(run: Path) -> Path:
    """Where the updates of a run stand: in the folder itself, or in that of an RFT run's fine-tuning."""
    own, tuned = RunFolder(run).metrics_path, run / "train-samples" / "metrics.jsonl"
    return tuned if tuned.exists() and not own.exists() else own


def with_step(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that say which update they are of."""
    return [line for line in lines if number(line.get("step")) is not None]


def number(value: Any) -> float | None:
    """A finite number, or None for anything else that may stand in a record."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def table(value: Any) -> dict[str, Any]:
    """A table of a record, empty where there is none."""
    return value if isinstance(value, dict) else {}


def _state(events: list[dict[str, Any]]) -> State | None:
    """From the last event that says how the run stands."""
    for event in reversed(events):
        kind, why = event.get("event"), str(event.get("why", ""))
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


def _rft_state(events: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> State | None:
    """The stages of an RFT run end one by one; the test of what was trained is the last."""
    last = events[-1] if events else {}
    if last.get("event") == "failed":
        return State("failed", str(last.get("error", "failed")))
    tested = [
        line
        for line in evaluations
        if line.get("weights") != "base" and (number(line.get("at")) or 0) >= (number(last.get("at")) or 0)
    ]
    if tested:
        return State("finished", "tested after fine-tuning")
    if (stage := _STAGES.get(str(last.get("event")))) is None:
        return None
    why = str(last.get("why", ""))
    return State("between stages" if why == "finished" else "stopped", f"{stage}: {why}")


def silence_limit_s(metrics: list[dict[str, Any]]) -> float:
    """How long a run that goes on may write nothing."""
    typical = [step_s for line in metrics[-20:] if (step_s := number(line.get("step_s"))) is not None]
    return max(SILENT_AFTER_S, 10 * median(typical) if typical else 0.0)


def silent_s(path: Path) -> float:
    """Time since anything was written that a run writes while it goes on."""
    places = (
        metrics_path(path),
        RunFolder(path).events_path,
        *(path / name for name in SAMPLES),
        path / "recipe.toml",
    )
    return max(
        0.0, time.time() - max((place.stat().st_mtime for place in places if place.exists()), default=0.0)
    )


def _samples(path: Path) -> dict[str, Any] | None:
    if not (path / "samples.db").is_file():
        return None
    from redline.rft.stats import stats
    from redline.rft.store import Store

    with Store(path / "samples.db", create=False) as store:
        begun = store.begun()
    return stats(path) if begun else None


def _tuning(path: Path) -> list[dict[str, Any]]:
    """A result.json without trials is somebody else's."""
    return (
        _rows((_json(path / "result.json", dict) or {}).get("rows"))
        if (path / "trials.jsonl").exists()
        else []
    )


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as text: {error}; restore it, or move it away to go on without it"
        ) from error


def _json(path: Path, kind: type) -> Any:
    if not (text := _text(path)):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; move it away to go on without it") from error
    if not isinstance(value, kind):
        raise DataError(
            f"{path} must hold a {kind.__name__}, got a {type(value).__name__}; move it away to go on"
            " without it"
        )
    return value
