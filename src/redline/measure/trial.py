"""What a trial is and what it gave. No torch.

    Trial(subject="redline.measure.training:TrainingSubject", setting={...}, timing=Timing())
    Measurement(outcome="ok", blocks_s=(0.51, 0.50, ...), tokens_per_step=65536, ...)

    with TrialFolder(path, machine="...") as folder:
        folder.find(key), folder.find_pair(key)
        folder.add(key, "bf16", measured, beside=before, paired=True)

process.py runs trials in children, turns.py lets them take turns. Every tuning and every ablation has a folder, in which
finished trials are kept (trials.jsonl), one per line, and are not run again. Those of another machine or other software
stay in the file but are not found.
"""

import fcntl
import json
import signal
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

from redline.config.load import build, to_toml
from redline.config.recipe import PlanPins, Recipe, fingerprint_of
from redline.errors import ConfigError, DataError, StorageError
from redline.measure.statistics import FEWEST_BLOCKS, Comparison, compare
from redline.plan.plan import PLANNED, Plan, to_json
from redline.plan.values import VALUES
from redline.record.files import storage_errors, write_atomic
from redline.record.run import LineWriter, read_lines

TrialOutcome = Literal["ok", "out_of_memory", "crashed", "timed_out"]
TRAINING = "redline.measure.training:TrainingSubject"
RANDOM_WEIGHTS = "random-weights"
"""A `model.init_from` for fine-tuning recipes: a model of the recipe's shape, and random rows."""
SCRATCH = "REDLINE_TRIAL_FOLDER"
"""Tells a child where to write what its parent will remove. Not TMPDIR, where compilers keep their results."""
RANDOM_ROWS = 1000
PROMPT_SHARE, ANSWER_SHARE = (0.14, 0.28), (0.08, 0.20)
"""Random prompts and answers as shares of the longest row, as in tuning guide 003 (docs/claims.md)."""
KILLED = f"killed by signal {signal.SIGKILL.value}"


@dataclass(frozen=True, kw_only=True)
class Timing:
    blocks: int = FEWEST_BLOCKS
    block_s: float = 0.5
    """A block holds as many whole steps as fill this time, at least one."""
    guard_steps: int = 5
    """Steps whose losses and gradient norms are kept; warm-up is at least as long."""
    warmup_s: float = 10.0
    """Warm-up ends after this time even if steps still get faster; the first step, which compiles, does not count."""
    limit_s: float = 300.0
    """A child that does not answer for this long counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    subject: str
    """Its class, as `module:name`; child.py says what it must offer."""
    setting: dict[str, Any]
    """What the class is made from; plain JSON."""
    allocator: str = ""
    """torch's allocator setting, applied before torch is imported; the user's own wins."""
    process: str = ""
    """Trials with the same value can be measured by one process, one after the other; empty: each needs a new one."""
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak bytes since the setting was made. On a CPU the first three are resident bytes beyond the imports'."""

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    other_bytes: int
    """Outside torch's allocator: CUDA context and libraries; on a CPU, the imports."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a trial gave; if it failed, what it gave before that."""

    outcome: TrialOutcome
    error: str | None = None
    blocks_s: tuple[float, ...] = ()
    """Seconds per step, one per block."""
    steps_per_block: int = 0
    tokens_per_step: int = 0
    memory: PeakMemory | None = None
    first_step_s: float | None = None
    """From making the setting to the end of its first step: building, compiling."""
    warmup_steps: int = 0
    data_wait_share: float = 0.0
    """Share of the blocks' time that the steps waited for data."""
    losses: tuple[float | None, ...] = ()
    grad_norms: tuple[float | None, ...] = ()
    """None: not a number."""
    elapsed_s: float = 0.0
    """What the trial cost."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / median(self.blocks_s)

    @property
    def was_killed(self) -> bool:
        """Whether a SIGKILL ended it, as the system does when memory runs out."""
        return self.outcome == "crashed" and KILLED in (self.error or "")

    @property
    def lacked_memory(self) -> bool:
        """Whether memory was, or may have been, the reason."""
        return self.outcome == "out_of_memory" or self.was_killed


@dataclass(frozen=True, kw_only=True)
class Pair:
    before: Measurement
    after: Measurement
    paired: bool
    """Whether they took turns."""

    @property
    def comparison(self) -> Comparison | None:
        """How much faster the second is, by seconds per token, as batches may differ; None if one failed."""
        if self.before.outcome != "ok" or self.after.outcome != "ok":
            return None
        first, second = ([s / arm.tokens_per_step for s in arm.blocks_s] for arm in (self.before, self.after))
        return compare(first, second, paired=self.paired)

    @property
    def rounds(self) -> int:
        return min(len(self.before.blocks_s), len(self.after.blocks_s))


@dataclass(frozen=True, kw_only=True)
class GenerationSwitches:
    """How a trial completes prompts; by default everything is on."""

    precision: Literal["fp32", "bf16"] = "bf16"
    cached: bool = True
    """Off: every token is a pass over all tokens before it."""
    merged: bool = True
    """Adapters merged into the weights. Off: computed beside them, which needs `cached` off."""
    slots: int | None = None
    """Sequences generated together; None: all of them, if memory holds them."""
    refilled: bool = True
    """A slot takes the next sample when its own ends. Off: a batch runs until its longest sample has ended."""
    shared: bool = True
    """Samples of a prompt share its keys and values."""
    graphs: bool = True
    """A decode step is a CUDA graph."""
    clear_cache: bool = False
    """torch.cuda.empty_cache() after every batch; needs `refilled` off, because refilled slots have no batches."""

    def in_force(self) -> Self:
        """The same, with switches that have no effect here at one value: equal work has equal settings."""
        if not self.cached:
            return replace(self, refilled=False, shared=False, graphs=False)
        return replace(self, merged=True, clear_cache=self.clear_cache and not self.refilled)


def train_trial(recipe: Recipe, plan: Plan, timing: Timing | None = None, *, padded: bool = False) -> Trial:
    """A recipe's real training loop under a plan; with `padded`, fine-tuning pads its rows to the longest."""
    lasting = [getattr(plan, name) for name in PLANNED if VALUES[name].lasting]
    unpinned = replace(recipe, plan=PlanPins())  # equal plans are one trial, whoever decided their values
    setting = {"recipe": to_toml(unpinned), "plan": to_json(plan), **({"padded": True} if padded else {})}
    return Trial(
        subject=TRAINING,
        setting=setting,
        allocator=plan.allocator,
        process=json.dumps(lasting),
        timing=timing or Timing(),
    )


def trial_key(trial: Trial) -> str:
    """A hash of what decides a trial's outcome; the reasons in its plan do not."""
    setting = dict(trial.setting)
    if "plan" in setting:
        plan = setting["plan"]
        setting["plan"] = {name: plan[name]["value"] for name in PLANNED} | {"world_size": plan["world_size"]}
    return fingerprint_of([trial.subject, setting, trial.allocator, asdict(trial.timing)])


class TrialFolder:
    """Trials in a folder that this process owns until it leaves the `with` block."""

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

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._lock.close()

    def find(self, key: str) -> Measurement | None:
        """The trial of this key, if it was finished before."""
        if key not in self._done:
            return None
        return build(Measurement, self._done[key]["measured"], where="trials.jsonl")

    def find_pair(self, key: str) -> Pair | None:
        """The trial of this key with what it was compared with."""
        if (after := self.find(key)) is None:
            return None
        before = build(Measurement, self._done[key]["beside"], where="trials.jsonl")
        return Pair(before=before, after=after, paired=self._done[key]["paired"])

    def add(
        self,
        key: str,
        name: str,
        measured: Measurement,
        *,
        beside: Measurement | None = None,
        paired: bool | None = None,
    ) -> None:
        """Write a finished trial and what it was compared with in one line: both are there or neither."""
        about = {"key": key, "name": name, "machine": self.machine, "paired": paired}
        arms = {"measured": asdict(measured), "beside": asdict(beside) if beside else None}
        self._done[key] = {**about, **arms}
        self._lines.append(self._done[key])


def _stands(line: dict[str, Any], path: Path) -> bool:
    """Whether a trial need not run again: it ended well, or did not fit even alone. A crash may be chance."""
    try:
        measured = build(Measurement, line["measured"], where="measured")
        beside = build(Measurement, line["beside"], where="beside") if line["beside"] is not None else None
        fits_nowhere = measured.outcome == "out_of_memory" and not line["paired"]
    except (ConfigError, KeyError) as error:
        raise DataError(
            f"{path} is damaged: {json.dumps(line)[:100]}: {error}; delete that line, or move the file away"
        ) from error
    return (measured.outcome == "ok" or fits_nowhere) and (beside is None or beside.outcome == "ok")
