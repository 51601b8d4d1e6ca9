"""The one result of reading: updates, facts, claims. Readers fill it, rules read it.

Units are settled here, once: seconds, bytes, tokens of all GPUs together, shares as fractions. A reader that had to
convert or to guess says so in `notes`. None stands for what a log does not hold; a rule that needs it stays silent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

from redline.config.recipe import Precision, Recipe
from redline.diagnose.trainers import Trainer, named
from redline.machine.specs import SPECS, GpuSpec
from redline.plan.plan import Plan
from redline.record.metrics import PHASES
from redline.record.read import WARM_UP
from redline.record.slowest import Slowest

FEWEST_UPDATES = 6
"""A share of the update needs at least this many updates after the warm-up: one or two may be anything."""


def warm_up(count: int) -> int:
    """How many of so many timed lines are left out."""
    return min(WARM_UP, max(count // 3, count > 1))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of a log: an update, or the mean over the updates since the line before."""

    step: int
    step_s: float | None = None
    tokens: float | None = None
    """Tokens of one update, all GPUs together."""
    loss: float | None = None
    not_a_number: bool = False
    """Whether the log shows a loss that is not a number (nan, inf, null)."""
    bad_norm: bool = False
    """Whether it shows a gradient norm that is not a number: a loss scaler's skipped update, unless it stays so."""
    grad_norm: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None
    data_wait_s: float | None = None
    generate_s: float | None = None
    weights_s: float | None = None
    reward_s: float | None = None
    reference_s: float | None = None
    critic_s: float | None = None
    copy_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    combine_s: float | None = None
    optimizer_s: float | None = None
    diagnose_s: float | None = None
    communication_s: float | None = None
    """Time for which the update waited for other processes."""
    issue_s: float | None = None
    """Time the host took to hand the update to the GPU."""
    padding_share: float | None = None
    elapsed_s: float | None = None
    cold: bool | None = None
    """Whether it belongs to the warm-up of an attempt, where the reader knows (record/read.py)."""
    more: Mapping[str, float] = field(default_factory=dict)
    """All other numbers of the line, under their names in plain words: `timing s gen`."""

    @property
    def idle_s(self) -> float | None:
        """What is left of an update when its phases are taken away; None where they were not measured."""
        phases = [value for name in PHASES if (value := getattr(self, name)) is not None]
        return max(0.0, self.step_s - sum(phases)) if self.step_s is not None and len(phases) >= 3 else None

    @property
    def felt_wait_s(self) -> float:
        """The wait for the loader that the step felt: on a GPU, the part that outlasted the update before it."""
        waited, idle = self.data_wait_s or 0.0, self.idle_s
        return waited if idle is None else min(waited, idle)


MEASURED = {field.name for field in fields(Step)} - {"step", "not_a_number", "bad_norm", "cold", "more"}
"""The numbers of a step."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about the run besides its updates. `--fact NAME=VALUE` sets any of them."""

    model: str | None = None
    parameters: float | None = None
    trained_parameters: float | None = None
    """Fewer than `parameters` where adapters are trained."""
    num_layers: float | None = None
    hidden_size: float | None = None
    experts: float | None = None
    """Experts of a mixture: a token passes few of them."""
    flops_per_token: float | None = None
    total_flops: float | None = None
    """FLOPs of the whole run, as the trainer counts them."""
    gpus: float | None = None
    gpu: str | None = None
    """A board of the datasheet table, e.g. `h100-80g`."""
    memory_bytes: float | None = None
    """Memory of one device."""
    memory_used_bytes: float | None = None
    """The most in use on one device, where it is not in the lines."""
    batch_size: float | None = None
    """Sequences per update, all GPUs together."""
    tokens: float | None = None
    """Tokens per update, all GPUs together."""
    micro_batch: float | None = None
    model_parallel: float | None = None
    """GPUs that hold one copy of the model together."""
    accumulation: float | None = None
    seq_len: float | None = None
    row_tokens: float | None = None
    """Mean length of the training rows."""
    prompt_length: float | None = None
    response_length: float | None = None
    """Mean length of the responses."""
    longest_response: float | None = None
    """The longest response of a step: generation ends with it."""
    prompt_room: float | None = None
    response_room: float | None = None
    """Positions that padded prompts and responses take."""
    samples: float | None = None
    """Responses generated for each prompt."""
    precision: Precision | None = None
    recompute: Literal["full", "selective", "on", "off"] | None = None
    """What activations are computed again in the backward pass: `full`, `selective`, `off`, or `on` where it is not
    said which."""
    compile: Literal["on", "off"] | None = None
    """`off` where nothing is compiled."""
    offload: Literal["on", "off"] | None = None
    """`on` where weights or optimiser states live in host memory."""
    packing: Literal["on", "off"] | None = None
    rollout: str | None = None
    """What generates, e.g. `hf` or `vllm`."""
    eager_rollout: str | None = None
    use_cache: Literal["true", "false"] | None = None
    """`false` where generation keeps no keys and values."""
    remove_padding: str | None = None
    eval_iters: float | None = None
    eval_interval: float | None = None
    mfu_peak_tflops: float | None = None
    """The peak that the log's own MFU is counted against."""
    mfu_scope: Literal["the step", "the actor's update"] = "the step"
    """What the log's MFU is measured over."""

    @property
    def flops(self) -> float | None:
        """FLOPs of a token, without attention's; unknown of a mixture of experts whose log does not count them."""
        parameters = self.parameters if (self.experts or 0) < 2 else None
        return self.flops_per_token or (6 * parameters if parameters else None)

    @property
    def tokens_a_pass(self) -> float | None:
        return self.micro_batch * self.seq_len if self.micro_batch and self.seq_len else None


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}–{self.high:g}"

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    @property
    def shown(self) -> str:
        return f"{self.low:.1f}–{self.high:.1f}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A number that a document states: a value before and after, or a factor."""

    name: str
    """`tokens_per_s`, `mfu`, `memory_share`, `speedup` (of one change), `total` (of all), `parameters`, or the
    document's own word."""
    line: int
    text: str
    before: Range | None = None
    after: Range | None = None
    factor: Range | None = None


@dataclass(frozen=True)
class Setting:
    """`name = value` as a document writes it; `when` is `before`, `after`, or nothing."""

    name: str
    value: str
    line: int
    when: str = ""
    within: str = ""
    """The call that it is an argument of."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    source: str
    format: str
    """`run` (a folder of ours), `document`, `runs` (a table with a line a run), or the kind of log."""
    trainer: Trainer = field(default_factory=lambda: named(""))
    steps: tuple[Step, ...] = ()
    updates: int = 0
    """Updates that the log shows: the last step's number, or how many there are from where it starts."""
    planned: int | None = None
    """Updates that the run was to have."""
    facts: Facts = field(default_factory=Facts)
    claims: tuple[Claim, ...] = ()
    settings: tuple[Setting, ...] = ()
    text: str = ""
    """The text of a log or document, for rules that look for words."""
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None
    plan: Plan | None = None
    late: Slowest | None = None
    """With several processes, the one that the others wait for."""
    events: tuple[dict[str, Any], ...] = ()
    """Our runs: their events.jsonl; other logs: the validations and checkpoints that the log shows: `step`, and
    `took_s` where it can be told."""
    lines_are_means: bool = False
    """Whether the time of a line is the mean over the updates since the line before, or that of one update."""
    printed_tokens_per_s: float | None = None
    """The log's own figure, where it is not what step time and batch give."""

    @property
    def kind(self) -> str:
        """How the rules see it: a `run` of ours, a `page` of claims, or a `log`."""
        return {"run": "run", "document": "page"}.get(self.format, "log")

    @cached_property
    def steady(self) -> tuple[Step, ...]:
        """The steps after the warm-up that have a time."""
        timed = [s for s in self.steps if s.step_s]
        if any(s.cold is not None for s in timed):
            return tuple(s for s in timed if not s.cold)
        return tuple(timed[warm_up(len(timed)) :])

    @cached_property
    def stride(self) -> int:
        """Updates from one line to the next: 1 where every update is logged."""
        apart = [after.step - before.step for before, after in pairwise(self.steps)]
        return max(1, round(median(apart))) if apart else 1

    @property
    def enough(self) -> bool:
        """Whether the log holds enough steady updates to speak of their mean."""
        return len(self.steady) * (self.stride if self.lines_are_means else 1) >= FEWEST_UPDATES

    @property
    def spec(self) -> GpuSpec | None:
        return SPECS.get(self.facts.gpu or "")

    @property
    def peak_tflops(self) -> float | None:
        """What one GPU can do in half precision, by its datasheet."""
        return (self.spec.bf16_tflops or self.spec.fp16_tflops) if self.spec else None

    def _told(self, name: str) -> list[float]:
        """One value of the steady steps; none where fewer than half of them have it."""
        found = [value for s in self.steady if (value := getattr(s, name)) is not None]
        return found if 2 * len(found) >= len(self.steady) else []

    def median(self, name: str) -> float | None:
        return median(found) if (found := self._told(name)) else None

    def mean(self, name: str) -> float | None:
        return fmean(found) if (found := self._told(name)) else None

    def share(self, name: str) -> float:
        """Share of the steady steps' time that one part takes; a step without it spent none on it."""
        total_s = sum(s.step_s or 0.0 for s in self.steady)
        return min(1.0, sum(getattr(s, name) or 0.0 for s in self.steady) / total_s) if total_s else 0.0

    def part(self, name: str) -> float | None:
        """Median of one of the trainer's own parts of the step."""
        return self.other(f"timing s {name}")

    def other(self, name: str) -> float | None:
        """Median of any other number of the lines."""
        found = [s.more[name] for s in self.steady if name in s.more]
        return median(found) if found else None

    @property
    def tokens_per_s(self) -> float | None:
        """Median speed of the steady steps, all GPUs together."""
        found = [s.tokens / s.step_s for s in self.steady if s.tokens and s.step_s]
        return median(found) if found else None

    @property
    def memory_share(self) -> float | None:
        used, have = self.used_bytes, self.facts.memory_bytes
        return min(1.0, used / have) if used and have else None

    @property
    def used_bytes(self) -> float | None:
        return self.median("memory_bytes") or self.facts.memory_used_bytes

    def last_event(self, kind: str) -> dict[str, Any]:
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})

    def start(self, name: str) -> Range | None:
        """The first value of a quantity that a page starts from."""
        return next((c.before for c in self.claims if c.name == name and c.before), None)

    def setting(self, name: str, when: str = "") -> Setting | None:
        """The last setting of this name (with `when`, of that time)."""
        found = [s for s in self.settings if s.name.split(".")[-1] == name and (not when or s.when == when)]
        return found[-1] if found else None
