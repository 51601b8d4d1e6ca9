"""Where a tuning lives: its trials, so that one that was killed goes on, and its result, which `--plan auto`
finds. No torch.

    $REDLINE_CACHE/tune/<machine>-<fingerprint>-<pins>/
        recipe.toml       what is trained: trials of another recipe do not belong here
        trials.jsonl      one line a finished trial; a trial that stands there is not run again
        plan.json         the fastest plan, every value with its reason
        result.json       how much faster than the rules' plan, measured when, on what

The machine's key holds GPU, driver, CPU and torch's version; the fingerprint everything that defines the
training; the pins what the user fixed: another of any of them is another tuning.
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
from redline.errors import ConfigError, DataError, StorageError
from redline.machine.facts import MachineFacts, machine_key
from redline.plan.plan import PLANNED, Plan, check_fit, load, save
from redline.record.files import cache_folder, storage_errors, write_atomic
from redline.record.run import LineWriter, read_lines
from redline.tune.statistics import Comparison
from redline.tune.trial import Measured, Outcome, Trial


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the trial table."""

    name: str
    predicted: float | None
    """Speed against the best plan's of that time, before it was tried."""
    outcome: Outcome | None = None
    """None: not tried."""
    tokens_per_s: float | None = None
    """From the median block."""
    memory_bytes: int | None = None
    """Peak reserved by torch; on a CPU resident."""
    comparison: Comparison | None = None
    """With the best plan of that time."""
    rounds: int | None = None
    """Blocks of each that the comparison was made with; below FEWEST_BLOCKS where it was given up."""
    verdict: str
    """kept; the comparison's; the outcome of one that failed; not compared, for want of a reference; not
    tried."""
    note: str = ""
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a tuning found."""

    tuned_at: str
    """ISO time, UTC."""
    against: str = "the rules' plan"
    """What the ratio is against: the rules' plan, or where that did not run, what it was cut to."""
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
    unconfirmed: str = ""
    """Why the last comparison, of the winner with the rules' plan, failed: then the ratio is the product of
    those that chose it."""
    rows: tuple[Row, ...] = ()
    """The trial table; results of earlier versions have none."""


def pinned(plan: Plan) -> dict[str, Any]:
    """Values that somebody fixed and a search must leave alone."""
    return {
        name: getattr(plan, name) for name in PLANNED if plan.why[name].source not in ("rule", "measurement")
    }


def tuning_folder(facts: MachineFacts, rules: Plan) -> Path:
    """The folder of the tuning that starts from this plan of the rules."""
    pins = hashlib.sha256(json.dumps(pinned(rules), sort_keys=True).encode()).hexdigest()[:8]
    return cache_folder() / "tune" / f"{machine_key(facts)}-{rules.fingerprint}-{pins}"


def tuned_plan(folder: Path, recipe: Recipe) -> tuple[Plan, Result] | None:
    """The result kept in a folder for this recipe; None when there is none. One in another layout, or of
    another recipe, is an error that says what to do."""
    if not (folder / "result.json").exists():
        return None
    try:
        table = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        plan, result = load(folder / "plan.json"), build(Result, table, where="result.json")
        check_fit(plan, recipe, world_size=1)
        return plan, result
    except (OSError, ValueError, ConfigError) as error:  # ValueError covers broken JSON and broken UTF-8
        raise ConfigError(
            f"the tuning kept in {folder} cannot be used: {error}; run `redline tune` again, or delete it"
        ) from error


def check_folder(path: Path, recipe: Recipe) -> None:
    """Refuse a folder in which trials of this recipe would write over something else: a run, or the trials of
    another recipe. A plan that cannot be read is of no use to anybody, and is no reason."""
    way_out = "give another folder with --out"
    for name in ("metrics.jsonl", "checkpoints", "samples.db"):
        if (path / name).exists():
            raise StorageError(
                f"{path} holds a run ({name}), whose recipe and plan trials would write over: {way_out}"
            )
    if (path / "recipe.toml").exists():
        try:
            before = from_toml((path / "recipe.toml").read_text(encoding="utf-8"), where="recipe.toml")
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise StorageError(
                f"{path} holds a recipe that cannot be read, and may not be this one: {error}; {way_out}"
            ) from error
        name, fingerprint, how = before.name, before.fingerprint, differences(before, recipe)
    else:
        try:
            plan = load(path / "plan.json")
        except ConfigError:
            return
        name, fingerprint, how = (
            plan.recipe,
            plan.fingerprint,
            [f"fingerprint {plan.fingerprint} before, {recipe.fingerprint} now"],
        )
    if fingerprint != recipe.fingerprint:
        raise StorageError(
            f"{path} holds trials of another recipe ({name}: {', '.join(how[:3])}): {way_out}, or delete"
            " that one"
        )


class TuningFolder:
    """Trials under way (of a tuning, an ablation), in a folder that this process owns until it leaves the
    `with` block. Those of another `machine`, or of other software on it, stay in the file and are not
    found."""

    def __init__(self, path: Path, machine: str = "") -> None:
        self.path, self.machine = path, machine

    def __enter__(self) -> Self:
        with storage_errors("the trials", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{self.path} is in use by another process: wait for it, or give another folder with --out"
            ) from None
        path = self.path / "trials.jsonl"
        try:
            with storage_errors("the trials", path):
                known = [line for line in read_lines(path) if _stands(line, path)]
        except (DataError, StorageError):
            self._lock.close()
            raise
        self._done = {line["key"]: line for line in known if line.get("machine", "") == self.machine}
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in known))  # without a torn last line
        self._lines = LineWriter(path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._lock.close()

    def find(self, key: str) -> Measured | None:
        """The trial of this key, if it was finished before."""
        return (
            build(Measured, self._done[key]["measured"], where="trials.jsonl") if key in self._done else None
        )

    def find_beside(self, key: str) -> Measured | None:
        """What took turns with the trial of this key."""
        return build(Measured, self._done[key]["beside"], where="trials.jsonl") if key in self._done else None

    def find_paired(self, key: str) -> bool | None:
        """Whether the two took turns; None where the line, of an earlier version, does not say."""
        paired = self._done[key].get("paired") if key in self._done else None
        return paired if isinstance(paired, bool) else None

    def add(
        self, key: str, name: str, measured: Measured, *, beside: Measured | None = None, **facts: Any
    ) -> None:
        """Write down a finished trial, and the one that took turns with it: in one line, so that both are
        there or neither."""
        where = {"key": key, "name": name, "machine": self.machine}
        self._done[key] = {
            **where,
            **facts,
            "measured": asdict(measured),
            "beside": asdict(beside) if beside else None,
        }
        self._lines.append(self._done[key])

    def finish(self, plan: Plan, result: Result) -> None:
        """The plan first: a result without one would be believed."""
        save(plan, self.path / "plan.json")
        write_atomic(self.path / "result.json", json.dumps(asdict(result), indent=1) + "\n")


def _stands(line: dict[str, Any], path: Path) -> bool:
    """Whether a trial need not be run again: it ended well, or did not fit by itself. A crash or the end of
    the time may not come a second time, and what did not fit beside another may fit alone."""
    try:
        if not isinstance(line.get("key"), str):
            raise ConfigError("a trial has a key")
        measured = build(Measured, line.get("measured"), where="measured")
        beside = build(Measured, line["beside"], where="beside") if line.get("beside") is not None else None
        for arm in (measured, beside):
            if (
                measured.outcome == "ok"
                and arm
                and arm.outcome == "ok"
                and not (arm.blocks_s and min(*arm.blocks_s, arm.tokens_per_step) > 0)
            ):
                raise ConfigError("a trial that ended well has tokens, and times of blocks above 0")
    except ConfigError as error:
        raise DataError(
            f"{path} is damaged: {json.dumps(line)[:100]}: {error}; delete that line, or move the file away"
        ) from error
    together = line.get("paired", beside is not None)
    return (measured.outcome == "ok" or (measured.outcome == "out_of_memory" and not together)) and (
        not beside or beside.outcome == "ok"
    )


def trial_key(trial: Trial, *beside: str) -> str:
    """Names a trial: what decides its outcome, not the reasons that stand in its plan."""
    setting = dict(trial.setting)
    if "plan" in setting:
        plan = setting["plan"]
        setting["plan"] = {name: plan[name]["value"] for name in PLANNED} | {"world_size": plan["world_size"]}
    what = [trial.workload, setting, trial.allocator, asdict(trial.bounds), *beside]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
