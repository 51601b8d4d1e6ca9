"""A laboratory without processes: children that answer from a table, and a clock that moves only by their work."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redline.measure.process import ChildFailed, Children
from redline.measure.trial import PeakMemory, Trial, trial_key

KILLED = "killed"
HANGS = "hangs"
ERRORS = {"crashed": "planted", "out_of_memory": "planted", KILLED: "killed by signal 9 (planted)"}


@dataclass
class Behaviour:
    """How a trial behaves; starts and blocks are counted over all children that ever had it."""

    step_s: float = 1.0
    noise: Sequence[float] = (0.0, 0.001, -0.001)
    """Shares by which blocks differ, in turn."""
    takes_s: float | None = None
    """What a block takes by the clock; None: a step."""
    start_s: float = 1.0
    tokens: int = 1000
    losses: Sequence[float] = (2.0, 1.0)
    waits: float = 0.0
    taken_bytes: int = 1
    starts: Mapping[int, str] = field(default_factory=dict)
    """The outcome of the first, second ... start where it is not ok; 0: of all."""
    blocks: Mapping[int, str] = field(default_factory=dict)


class LabChild:
    def __init__(self, lab: "Lab") -> None:
        self.lab, self.alive, self.taken_bytes = lab, True, 0
        self.trial: Trial | None = None

    def __enter__(self) -> "LabChild":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, trial: Trial, limit_s: float) -> dict[str, Any]:
        assert self.alive, "a child that ended is not asked"
        self.trial, self.taken_bytes = trial, 0
        self.lab.started.append(trial)
        how, count = self._how("starts")
        self._suffer(how.starts.get(count, how.starts.get(0)), how.start_s, limit_s)
        others_bytes = sum(child.taken_bytes for child in self.lab.children if child.alive)
        if others_bytes + how.taken_bytes > self.lab.capacity_bytes:
            self._suffer("out_of_memory", 0.0, limit_s)
        self.taken_bytes = how.taken_bytes
        losses = list(how.losses)
        return {
            "first_step_s": how.start_s, "warmup_steps": 5, "steps_per_block": 1, "tokens_per_step": how.tokens,
            "losses": losses, "grad_norms": [1.0] * len(losses),
        }  # fmt: skip

    def block(self, limit_s: float) -> dict[str, Any]:
        assert self.alive, "a child that ended is not asked"
        how, count = self._how("blocks")
        step_s = how.step_s * (1 + how.noise[count % len(how.noise)])
        self._suffer(how.blocks.get(count), step_s if how.takes_s is None else how.takes_s, limit_s)
        self.lab.blocks.append(self.trial)
        return {"step_s": step_s, "data_wait_s": how.waits * step_s}

    def memory(self, limit_s: float) -> PeakMemory:
        taken = self.taken_bytes
        other = self.lab.other_bytes
        return PeakMemory(allocated_bytes=taken, active_bytes=taken, reserved_bytes=taken, other_bytes=other)

    def close(self) -> None:
        self.alive = False

    def _how(self, what: str) -> tuple[Behaviour, int]:
        assert self.trial is not None
        name = f"{what} {trial_key(self.trial)}"
        self.lab.counts[name] += 1
        return self.lab.behaviour(self.trial), self.lab.counts[name]

    def _suffer(self, outcome: str | None, takes_s: float, limit_s: float) -> None:
        if outcome == HANGS or takes_s > limit_s:
            self.lab.now_s += limit_s
            self.close()
            raise ChildFailed("timed_out", f"no answer within {limit_s:.0f} s; killed")
        self.lab.now_s += takes_s
        if outcome is not None:
            self.close()
            raise ChildFailed("crashed" if outcome == KILLED else outcome, ERRORS[outcome])


class Lab(Children):
    def __init__(self, behaviour: Callable[[Trial], Behaviour], capacity_bytes: float = float("inf")) -> None:
        super().__init__(clock=lambda: self.now_s)
        self.behaviour, self.capacity_bytes, self.other_bytes, self.now_s = behaviour, capacity_bytes, 0, 0.0
        self.children: list[LabChild] = []
        self.started: list[Trial] = []
        self.blocks: list[Trial] = []
        self.counts: Counter[str] = Counter()

    def take(self, allocator: str) -> Any:
        self.children.append(LabChild(self))
        return self.children[-1]
