"""Trials: a workload measured in a process of its own, whose crash, lack of memory or hang is a result. No
torch here.

    measured = measure(train_trial(recipe, plan))                     # one arm
    before, after = measure_together([trial, other])                  # two, in turns: a drift of the clocks
                                                                      falls on both
    compare(before.blocks_s, after.blocks_s, paired=True)

The child (`python -m redline.tune.lifeline`) is spoken to in lines of JSON and does nothing between two of
them, so several can be alive and take turns. It ends when its standard input does, and in the middle of its
work when its parent is killed; a child that does not answer is killed with its whole process group. What it
wrote goes with it. `Child` is the handle where one process shall measure several settings (memory probes,
micro-batches). Left out: trials on several processes or machines.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from redline.config.load import build, to_toml
from redline.config.recipe import Recipe
from redline.plan.plan import Hardware, Plan, to_json
from redline.tune.scratch import SCRATCH, Scratch
from redline.tune.statistics import FEWEST_BLOCKS, NOISY_ROUNDS, noisy

Outcome = Literal["ok", "out_of_memory", "crashed", "timed_out"]
TRAIN = "redline.tune.child:Training"
COMMAND = (sys.executable, "-m", "redline.tune.lifeline")
"""Called with the number of the parent process behind it."""
LEAVE_S = 5.0
"""How long a child may take to tidy up when it is told to end."""
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
"""How a process that died says that memory was the reason: torch on a GPU, CUDA itself, torch on a CPU,
cuBLAS and cuDNN."""
MANY_CORES = 8
"""With fewer, a process that starts would be felt by the one that is measured."""
UNMOVED_S = 2.0
"""A step this long is not moved by what its process did before it."""
SHORTEST_LIMIT_S = 5.0
"""By this the end of the time may be passed, so that a child can say what it has."""
KILLED = f"killed by signal {signal.SIGKILL.value}"
LAST_WORDS = 6
"""Lines of an error that are looked at: CUDA's own has advice behind it."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long an arm is looked at."""

    blocks: int = FEWEST_BLOCKS
    block_s: float = 0.5
    """A block holds as many whole steps as fill this time, at least one."""
    guard_steps: int = 5
    """Steps whose losses and gradient norms are kept; warm-up is at least as long."""
    warmup_s: float = 10.0
    """Warm-up ends after this time though the steps may not be stationary yet; the first step, which
    compiles, does not count."""
    limit_s: float = 300.0
    """A child that does not answer for this long hangs."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A workload and its setting."""

    workload: str
    """Where its class stands, as `module:name`; child.py says what it must offer."""
    setting: dict[str, Any]
    """What the class is made from; plain JSON."""
    allocator: str = ""
    """torch's allocator setting, in force before torch is imported; a user's own wins."""
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of a process since its setting was made. On a CPU resident bytes beyond those of the
    imports, in all three."""

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    other_bytes: int
    """Beside torch's allocator: CUDA context, libraries; on a CPU what the imports take."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a trial gave. Of a trial that failed, what it gave before."""

    outcome: Outcome
    error: str | None = None
    blocks_s: tuple[float, ...] = ()
    """Seconds per step, one a block."""
    steps_per_block: int = 0
    tokens_per_step: int = 0
    memory: Memory | None = None
    first_step_s: float | None = None
    """From making the setting to the end of its first step: building, compiling."""
    warmup_steps: int = 0
    data_wait_share: float = 0.0
    """Of the time of the blocks, what the steps waited for data."""
    losses: tuple[float | None, ...] = ()
    grad_norms: tuple[float | None, ...] = ()
    """None: not a number."""
    elapsed_s: float = 0.0
    """What the trial cost."""


def was_killed(measured: Measured) -> bool:
    """Whether a SIGKILL ended it: the system's, where on a CPU memory runs out, or anybody's."""
    return measured.outcome == "crashed" and KILLED in (measured.error or "")


def lacked_memory(measured: Measured) -> bool:
    """Whether memory was, or may have been, the reason."""
    return measured.outcome == "out_of_memory" or was_killed(measured)


def limit_s_of(trial: Trial, until_s: float) -> float:
    """How long a child may take for an answer: one that has not answered when the time is over is not waited
    for."""
    return min(trial.bounds.limit_s, max(SHORTEST_LIMIT_S, until_s - time.monotonic()))


class ChildFailed(Exception):
    """A child did not answer as it should; caught here and turned into a result."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome, self.error = outcome, error


def train_trial(recipe: Recipe, plan: Plan, bounds: Bounds | None = None) -> Trial:
    """The real training loop of a recipe under a plan."""
    setting = {"recipe": to_toml(recipe), "plan": to_json(plan)}
    return Trial(workload=TRAIN, setting=setting, allocator=plan.allocator, bounds=bounds or Bounds())


class Child:
    """A child process. Ends with the `with` block, whatever it is doing, or with the thread that started it:
    on Linux its end is what the child is told of (lifeline.end_with)."""

    def __init__(self, allocator: str = "") -> None:
        environment = dict(os.environ)
        if allocator and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(environment):
            environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
        self._scratch = Scratch()
        environment[SCRATCH] = str(self._scratch.path)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [*COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self._unread = b""
        self._busy = False
        self.alive = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, trial: Trial, limit_s: float) -> dict[str, Any]:
        """Make the workload (instead of the one before, if any) and warm it up."""
        bounds = {name: getattr(trial.bounds, name) for name in ("block_s", "guard_steps", "warmup_s")}
        return self.ask(
            {"do": "start", "workload": trial.workload, "setting": trial.setting, **bounds}, limit_s
        )

    def block(self, limit_s: float) -> dict[str, Any]:
        """Run a block: its seconds per step, and how long it waited for data."""
        return self.ask({"do": "block"}, limit_s)

    def memory(self, limit_s: float) -> Memory:
        return build(Memory, self.ask({"do": "memory"}, limit_s), where="memory")

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """One line there, one line back; raises ChildFailed, and ends the child, where none comes that says
        ok."""
        assert self._process.stdin is not None
        self._busy = True
        with contextlib.suppress(BrokenPipeError):  # it is dead: reading says of what
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        line = self._read_line(limit_s)
        if line is None:
            self.close()
            raise ChildFailed("timed_out", f"no answer within {limit_s:.0f} s; killed")
        if not line:
            raise self._died()
        reply: dict[str, Any] = json.loads(line)
        self._busy = False
        if "failed" in reply:
            self.close()
            raise ChildFailed(reply["failed"], reply["error"])
        return reply

    def close(self) -> None:
        """End it. One that waits for a request tidies up and leaves by itself; one that is busy is killed
        with all it started."""
        if not self.alive:
            return
        self.alive = False
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0 if self._busy else LEAVE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the whole group has gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        self._scratch.close()

    def _read_line(self, limit_s: float) -> bytes | None:
        """The next line; empty when the child has closed its output, None when there is none in time."""
        assert self._process.stdout is not None
        handle, deadline_s = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([handle], [], [], left_s)[0]:
                return None
            if not (more := os.read(handle, 65536)):
                return b""
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _died(self) -> ChildFailed:
        # it closed its output and still lives: what it said so far counts
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.returncode
        self._errors.seek(0)
        said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        ended = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            ended += " (the system does so when memory runs out)"
        memory = [line for line in said[-LAST_WORDS:] if any(text in line for text in OUT_OF_MEMORY)]
        error = f"{ended}: {(memory or said)[-1].strip()[:300]}" if said else ended
        return ChildFailed("out_of_memory" if memory else "crashed", error)


class Children:
    """New children for one search. Beside a GPU, where cores are plenty, the next is started `ahead`, so that
    it imports torch, which takes seconds, while the one before it builds and compiles."""

    def __init__(self, *, ahead: bool) -> None:
        self._ahead = ahead
        self._ready: dict[str, Child] = {}

    @classmethod
    def on(cls, hardware: Hardware) -> Self:
        return cls(ahead=hardware.kind == "cuda" and hardware.cores >= MANY_CORES)

    def take(self, allocator: str) -> Child:
        child = self._ready.pop(allocator, None) or Child(allocator)
        if self._ahead:
            self._ready[allocator] = Child(allocator)
        return child

    def close(self) -> None:
        while self._ready:
            self._ready.popitem()[1].close()


def measure(
    trial: Trial,
    *,
    enough: Callable[[Sequence[float]], bool] = lambda blocks_s: False,
    child: Child | None = None,
) -> Measured:
    """Measure a trial in a child of its own, or in the one given. `enough` ends it before its last block."""
    with contextlib.ExitStack() as stack:
        arm = Arm(trial, child if child is not None else stack.enter_context(Child(trial.allocator)))
        arm.start()
        for _ in range(trial.bounds.blocks):
            arm.block()
            if enough(arm.blocks_s):
                break
        return arm.end()


def measure_together(trials: Sequence[Trial]) -> list[Measured]:
    """Measure trials in turns; all of them are in memory at once. One that fails leaves the others
    measuring."""
    with contextlib.ExitStack() as stack:
        arms = [Arm(trial, stack.enter_context(Child(trial.allocator))) for trial in trials]
        for arm in arms:
            arm.start()
        take_turns(arms, max(trial.bounds.blocks for trial in trials))
        return [arm.end() for arm in arms]


def take_turns(arms: Sequence["Arm"], rounds: int, enough: Callable[[], bool] = lambda: False) -> None:
    """A block of each arm in every round, in turned order every other round; more rounds where the machine is
    noisy, within the time that so many blocks were meant to take; fewer when `enough`. A round before them is
    not counted, because who waited has cold caches and a slow clock; steps that are long by themselves do not
    show it."""
    until_s = time.monotonic() + NOISY_ROUNDS * rounds * sum(arm.trial.bounds.block_s for arm in arms)
    for arm in arms:
        arm.forget()
        arm.block()
    counted = all(step_s > UNMOVED_S for arm in arms for step_s in arm.blocks_s)
    for arm in arms if not counted else ():
        arm.forget()
    for round_ in range(int(counted), rounds * NOISY_ROUNDS):
        if round_ == rounds and not any(noisy(arms[0].blocks_s, arm.blocks_s) for arm in arms[1:]):
            return
        if round_ > rounds and time.monotonic() > until_s:
            return
        for arm in arms if round_ % 2 == 0 else reversed(arms):
            arm.block()
        if enough() or all(arm.failed for arm in arms):
            return


class Arm:
    """A trial on its way in a child; a failure is remembered and ends it."""

    def __init__(self, trial: Trial, child: Child) -> None:
        self.trial, self.child, self.limit_s = trial, child, trial.bounds.limit_s
        self.started: dict[str, Any] = {}
        self.blocks_s: list[float] = []
        self.waited_s: list[float] = []
        self.memory: Memory | None = None
        self.failed: ChildFailed | None = None
        self.began_s = time.monotonic()

    def start(self) -> None:
        self._attempt(lambda: self.started.update(self.child.start(self.trial, self.limit_s)))

    def block(self) -> None:
        def run() -> None:
            reply = self.child.block(self.limit_s)
            self.blocks_s.append(reply["step_s"])
            self.waited_s.append(reply["data_wait_s"])

        self._attempt(run)

    def forget(self) -> None:
        """Leave out the blocks so far."""
        self.blocks_s, self.waited_s = [], []

    def end(self) -> Measured:
        """What it gave; the child stays as it is."""
        self._attempt(lambda: setattr(self, "memory", self.child.memory(self.limit_s)))
        found = {
            "outcome": self.failed.outcome if self.failed else "ok",
            "error": self.failed.error if self.failed else None,
            "blocks_s": self.blocks_s,
            "memory": vars(self.memory) if self.memory else None,
            "data_wait_share": sum(self.waited_s) / sum(self.blocks_s) if self.blocks_s else 0.0,
            "elapsed_s": time.monotonic() - self.began_s,
        }
        return build(Measured, {**found, **self.started}, where="trial")

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.failed is None:
            try:
                action()
            except ChildFailed as failed:
                self.failed = failed
