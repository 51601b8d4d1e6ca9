"""The always-on instruments: loss, gradient norm, time, memory and data wait of every update, without making
the GPU wait.

    instruments.begin()                      # the batch is ready; learner.mark is instruments.mark
    instruments.push(facts, update, work)    # enqueues a copy of its numbers and an event behind the update
    for line in instruments.ready(): ...     # lines of updates that are finished; the newest stays in flight

On a GPU the line of an update is read while the next one runs, so the host is never more than one update
ahead and the GPU never idles. Times are those of the GPU's own clock between the ends of two updates, and of
its phases between marks: one event per mark, two marks per pass, about 2 µs each on the host and nothing on the
GPU. With several processes each wait for the others is two marks more (process.py); what is hidden
behind a phase takes no time and is not told apart from it.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from redline.machine.nvml import GpuTelemetry, process_rss_bytes
from redline.plan.plan import Plan
from redline.record import startup
from redline.train.clock import Clock, Moment
from redline.train.process import COMMUNICATION, INTERRUPTED, Process
from redline.train.step import Update

GAUGES_EVERY_S = 1.0


@dataclass
class _InFlight:
    facts: dict[str, Any]
    work: "Work"
    names: tuple[str, ...]
    numbers: Tensor
    end: Moment
    marks: list[tuple[str, Moment]]
    issue_s: float | None


@dataclass(frozen=True)
class Work:
    """The work of an update, over all processes."""

    tokens: int
    rows: int


Rates = Callable[[Work, float], dict[str, float | None]]
"""The rates of an update, from its work and its seconds."""


def training_rates(plan: Plan, *, rows: bool = False) -> Rates:
    """Tokens (and rows) a second, and the shares of the datasheet's peak and of the measured one."""
    flops_per_token = plan.prediction.flops_per_token / plan.world_size
    peak_tflops = plan.hardware.peak_tflops.get(plan.precision if plan.precision != "fp8" else "bf16")
    measured_tflops = plan.hardware.measured_tflops.get(plan.precision)

    def rates(work: Work, step_s: float) -> dict[str, float | None]:
        tflops = flops_per_token * work.tokens / step_s / 1e12
        return {
            **({"rows_per_s": work.rows / step_s} if rows else {}),
            "tokens_per_s": work.tokens / step_s,
            "mfu": tflops / peak_tflops if peak_tflops else None,
            "ceiling_share": tflops / measured_tflops if measured_tflops else None,
        }

    return rates


def limit_shares(line: dict[str, Any], factor: float) -> dict[str, float]:
    """The shares of a line whose tokens take `factor` times the FLOPs that the plan counts."""
    return {name: line[name] * factor for name in ("mfu", "ceiling_share") if line.get(name) is not None}


def _phases(flight: _InFlight, clock: Clock) -> dict[str, float]:
    """Seconds of each phase, summed over the passes. Waits for other processes are taken out of their phase."""
    seconds: dict[str, float] = {}
    before_s = 0.0  # of the current phase, before the wait that interrupted it
    for (_, begin), (phase, end) in pairwise(flight.marks):
        length_s = clock.seconds(begin, end)
        if phase == INTERRUPTED:
            before_s += length_s
        elif phase == COMMUNICATION:
            seconds[phase] = seconds.get(phase, 0.0) + length_s
        else:
            seconds[phase], before_s = seconds.get(phase, 0.0) + before_s + length_s, 0.0
    return seconds if flight.issue_s is None else {**seconds, "issue_s": flight.issue_s}


OWN = (
    "data_wait_s",
    "copy_s",
    "forward_s",
    "backward_s",
    "combine_s",
    "reference_s",
    "critic_s",
    "optimizer_s",
)
"""What a process spends on an update without waiting for the others."""


def own_time(process: Process, line: dict[str, Any]) -> list[float]:
    """A list with this process's last update time in its own place: the sum over processes gives all times to all."""
    if process.world_size == 1:
        return []
    own_s = sum(line.get(name, 0.0) for name in OWN)
    return [own_s if rank == process.rank else 0.0 for rank in range(process.world_size)]


def slowest(own_s: Sequence[float]) -> dict[str, float]:
    """The slowest of all processes, its time and the mean of the others'; nothing before the first update."""
    if not any(own_s):
        return {}
    most_s = max(own_s)
    others_s = (sum(own_s) - most_s) / (len(own_s) - 1)
    return {"slowest_rank": own_s.index(most_s), "slowest_s": most_s, "others_s": others_s}


def start_up_s(device: torch.device) -> dict[str, float]:
    """Where the time up to the end of the first update went. That update compiles (`compile_s` of it), so wait for the GPU this once."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    startup.mark("first_update")
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is None:
        return startup.taken()
    return startup.taken() | {"compile_s": round(dynamo.calculate_time_spent()["total_wall_time"], 3)}


class Instruments:
    def __init__(self, device: torch.device, rates: Rates) -> None:
        self.device, self.rates, self._clock = device, rates, Clock(device)
        self._flying: deque[_InFlight] = deque()
        self._telemetry = GpuTelemetry(device.index or 0) if device.type == "cuda" else None
        self._memory_bytes, self._gauges_at = 0, -math.inf
        self._marks: list[tuple[str, Moment]] = []
        self._began_at = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin timing afresh, after something that is not part of a step, such as a validation."""
        assert not self._flying, "lines in flight would be timed from the wrong moment"
        self._last_end = self._clock.now()

    def begin(self) -> None:
        """An update begins; marks until the next `push` end its phases."""
        self._began_at = time.perf_counter()
        self._marks = [("", self._clock.now())]

    def mark(self, phase: str) -> None:
        """A phase of the update ends here, or is interrupted. Nothing is timed unless `begin` came before."""
        if self._marks:
            self._marks.append((phase, self._clock.now()))

    def push(self, facts: dict[str, Any], update: Update, work: Work) -> None:
        """Note an update that was just enqueued. `facts` goes into its line as it is."""
        numbers = torch.stack([number.float() for number in update.numbers.values()])
        if self.device.type == "cuda":
            numbers = torch.empty(len(numbers), pin_memory=True).copy_(numbers, non_blocking=True)
        issue_s = time.perf_counter() - self._began_at if self._marks else None
        names, end = tuple(update.numbers), self._clock.now()
        self._flying.append(_InFlight(facts, work, names, numbers, end, self._marks, issue_s))
        self._marks = []

    def ready(self, *, drain: bool = False) -> list[dict[str, Any]]:
        """Lines of finished updates, in order: all with `drain`, else (on a GPU) all but the newest."""
        leave = 0 if drain or self.device.type != "cuda" else 1
        lines = []
        while len(self._flying) > leave:
            lines.append(self._line(self._flying.popleft()))
        return lines

    def _line(self, flight: _InFlight) -> dict[str, Any]:
        step_s = self._clock.seconds(self._last_end, flight.end)  # waits for the copies too
        self._last_end = flight.end
        return {
            "step": flight.facts.pop("step"),
            **dict(zip(flight.names, flight.numbers.tolist(), strict=True)),
            "step_s": step_s,
            **self.rates(flight.work, step_s),
            **flight.facts,
            **_phases(flight, self._clock),
            **self._gauges(),
        }

    def _gauges(self) -> dict[str, float]:
        """Peak memory, and at most every GAUGES_EVERY_S the GPU's counters, which take part of a millisecond."""
        if self._telemetry is None:
            return {"memory_bytes": process_rss_bytes()}
        if (now := time.perf_counter()) - self._gauges_at < GAUGES_EVERY_S:
            return {"memory_bytes": self._memory_bytes}
        self._memory_bytes, self._gauges_at = torch.cuda.max_memory_allocated(self.device), now
        return {"memory_bytes": self._memory_bytes, **self._telemetry.read()}
