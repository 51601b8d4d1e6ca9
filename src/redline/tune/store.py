"""Where a tuning lives: its trials, so that one that was killed goes on, and its result, which `--plan auto` finds. No torch.

    $REDLINE_CACHE/tune/<machine>-<fingerprint>-<pins>/
        recipe.toml       what is trained: trials of another recipe do not belong here
        trials.jsonl      one line a finished trial; a trial that stands there is not run again
        plan.json         the fastest plan, every value with its reason
        result.json       how much faster than the rules' plan, measured when, on what

The machine's key holds GPU, driver, CPU and torch's version; the fingerprint everything that defines the training; the pins what the
user fixed: another of any of them is another tuning.
"""

import fcntl
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redline.config.load import build, from_toml
from redline.config.recipe import Recipe, differences
from redline.errors import ConfigError, StorageError
from redline.machine.facts import MachineFacts, machine_key
from redline.plan.plan import PLANNED, Plan, load, save
from redline.record.files import cache_folder, storage_errors, write_atomic
from redline.record.run import LineWriter, read_lines
from redline.tune.trial import Measured, Trial


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a tuning found."""

    tuned_at: str
    """ISO time, UTC."""
    ratio: float
    """Speed of the plan against that of the rules' plan, in turns; 1 where the rules' plan was kept."""
    low: float
    high: float
    paired: bool
    tokens_per_s: float
    trials: int
    elapsed_s: float
    untried: tuple[str, ...]
    """Candidates for which there was no time left."""


def pinned(plan: Plan) -> dict[str, Any]:
    """Values that somebody fixed and a search must leave alone."""
    return {name: getattr(plan, name) for name in PLANNED if plan.why[name].source not in ("rule", "measurement")}


def tuning_folder(facts: MachineFacts, rules: Plan) -> Path:
    """The folder of the tuning that starts from this plan of the rules."""
    pins = hashlib.sha256(json.dumps(pinned(rules), sort_keys=True).encode()).hexdigest()[:8]
    return cache_folder() / "tune" / f"{machine_key(facts)}-{rules.fingerprint}-{pins}"


def tuned_plan(folder: Path) -> tuple[Plan, Result] | None:
    """The result kept in a folder; None when there is none. One in another layout is an error that says what to do."""
    if not (folder / "result.json").exists():
        return None
    try:
        table = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return load(folder / "plan.json"), build(Result, table, where="result.json")
    except (OSError, ValueError, ConfigError) as error:  # ValueError covers broken JSON and broken UTF-8
        raise ConfigError(f"the tuning kept in {folder} cannot be used: {error}; run `redline tune` again, or delete it") from error


def check_folder(path: Path, recipe: Recipe) -> None:
    """Refuse a folder in which trials of this recipe would write over something else: a run, or the trials of another recipe. A plan that
    cannot be read is of no use to anybody, and is no reason."""
    way_out = "give another folder with --out"
    for name in ("metrics.jsonl", "checkpoints", "samples.db"):
        if (path / name).exists():
            raise StorageError(f"{path} holds a run ({name}), whose recipe and plan trials would write over: {way_out}")
    if (path / "recipe.toml").exists():
        try:
            before = from_toml((path / "recipe.toml").read_text(encoding="utf-8"), where="recipe.toml")
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise StorageError(f"{path} holds a recipe that cannot be read, and may not be this one: {error}; {way_out}") from error
        name, fingerprint, how = before.name, before.fingerprint, differences(before, recipe)
    else:
        try:
            plan = load(path / "plan.json")
        except ConfigError:
            return
        name, fingerprint, how = plan.recipe, plan.fingerprint, [f"fingerprint {plan.fingerprint} before, {recipe.fingerprint} now"]
    if fingerprint != recipe.fingerprint:
        raise StorageError(f"{path} holds trials of another recipe ({name}: {', '.join(how[:3])}): {way_out}, or delete that one")


class TuningFolder:
    """Trials under way (of a tuning, an ablation), in a folder that this process owns until it leaves the `with` block."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        with storage_errors("the trials", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"{self.path} is in use by another process, which measures the same: wait for it") from None
        path = self.path / "trials.jsonl"
        known = [line for line in read_lines(path) if _stands(line)]
        self._done = {line["key"]: line for line in known}
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in known))  # without a torn last line
        self._lines = LineWriter(path)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._lines.close()
        self._lock.close()

    def find(self, key: str) -> Measured | None:
        """The trial of this key, if it was finished before."""
        return build(Measured, self._done[key]["measured"], where="trials.jsonl") if key in self._done else None

    def find_beside(self, key: str) -> Measured | None:
        """What took turns with the trial of this key."""
        return build(Measured, self._done[key]["beside"], where="trials.jsonl") if key in self._done else None

    def add(self, key: str, name: str, measured: Measured, *, beside: Measured | None = None, **facts: Any) -> None:
        """Write down a finished trial, and the one that took turns with it: in one line, so that both are there or neither."""
        self._done[key] = {"key": key, "name": name, **facts, "measured": asdict(measured), "beside": asdict(beside) if beside else None}
        self._lines.append(self._done[key])

    def finish(self, plan: Plan, result: Result) -> None:
        """The plan first: a result without one would be believed."""
        save(plan, self.path / "plan.json")
        write_atomic(self.path / "result.json", json.dumps(asdict(result), indent=1) + "\n")


def _stands(line: dict[str, Any]) -> bool:
    """Whether a trial need not be run again: it ended well or did not fit. A crash or the end of the time may not come a second time."""
    return line["measured"]["outcome"] in ("ok", "out_of_memory") and (line.get("beside") or {"outcome": "ok"})["outcome"] == "ok"


def trial_key(trial: Trial, *beside: str) -> str:
    """Names a trial: what decides its outcome, not the reasons that stand in its plan."""
    setting = dict(trial.setting)
    if "plan" in setting:
        plan = setting["plan"]
        setting["plan"] = {name: plan[name]["value"] for name in PLANNED} | {"world_size": plan["world_size"]}
    what = [trial.workload, setting, trial.allocator, asdict(trial.bounds), *beside]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
