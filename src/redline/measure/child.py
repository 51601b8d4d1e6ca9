"""What runs in a trial's process: it makes a subject, warms it up, and times a block of its steps on request.

    {"do": "start", "subject": "redline.measure.training:TrainingSubject", "setting": {...}, "block_s": 0.5,
     "guard_steps": 5, "warmup_s": 10}
        -> {"first_step_s", "warmup_steps", "steps_per_block", "tokens_per_step", "losses", "grad_norms"}
    {"do": "block"}  -> {"step_s", "data_wait_s"}, both per step
    {"do": "memory"} -> the fields of trial.PeakMemory
    {"do": "rows", "function": "redline.bench.train:plain", "setting": {...}}
        -> {"row": ...} for each that the function yields, then {}

Requests and replies are lines of JSON; a second `start` replaces the first setting. A block is timed between two
synchronisations and has none inside. A known failure is a reply {"failed": ..., "error": ...}; anything else ends
the process with its traceback, which the parent reads.
"""

import contextlib
import gc
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import psutil
import torch

from redline.errors import RedlineError
from redline.machine.facts import read_facts
from redline.measure.statistics import stationary


class Subject(Protocol):
    """What a trial measures. A workload that offers this can be tuned, ablated and benchmarked."""

    tokens_per_step: int
    waited_s: float
    """Time that all steps so far waited for data."""
    losses: list[float]
    grad_norms: list[float]
    """Gradient norms of the steps so far; empty if the subject has none."""

    def __init__(self, setting: dict[str, Any]) -> None: ...
    def step(self) -> None:
        """Enqueue one step."""

    def drain(self) -> None:
        """Finish what is pending for the steps so far; a block ends with it."""

    def close(self) -> None: ...


def finite(numbers: Sequence[float]) -> list[float | None]:
    """None for what is not a number: an update that fp16 skipped has no norm, and JSON has no infinity."""
    return [number if math.isfinite(number) else None for number in numbers]


def timed(steps: int, step: Callable[[], Any], drain: Callable[[], None] = lambda: None) -> float:
    """Seconds of a block of steps between two synchronisations; `drain` belongs to the block."""
    synchronize()
    started_s = time.perf_counter()
    for _ in range(steps):
        step()
    drain()
    synchronize()
    return time.perf_counter() - started_s


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def cuda_peaks() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {f"{name}_bytes": stats[f"{name}_bytes.all.peak"] for name in ("allocated", "active", "reserved")}


def peak_bytes() -> int | None:
    """None on a CPU, where it is not known."""
    return cuda_peaks()["allocated_bytes"] if torch.cuda.is_available() else None


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def half() -> torch.dtype:
    """bf16, or fp32 on a CPU, which only emulates it."""
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def empty() -> None:
    """Make room for another setting, or the next row of a benchmark: its peak is its own."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def reachable_bytes() -> int:
    """Bytes free on the GPU or in this allocator; a decrease went to the process's context and libraries."""
    if torch.cuda.is_initialized():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return next((gpu.free_bytes for gpu in read_facts().gpus), 0)


class TrialServer:
    """What the process holds between requests."""

    def __init__(self) -> None:
        self.other_bytes = 0
        self.subject: Subject | None = None
        self.steps_per_block = 1
        self.resident_before_bytes = psutil.Process().memory_info().rss

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        self._clear()
        reached_bytes = reachable_bytes()
        began_s = time.perf_counter()
        subject: Subject = named(request["subject"])(request["setting"])
        self.subject = subject
        timed(1, subject.step, subject.drain)
        first_step_s = time.perf_counter() - began_s
        steps_s: list[float] = []
        while len(steps_s) + 1 < request["guard_steps"] or not (
            stationary(steps_s) or sum(steps_s) > request["warmup_s"]
        ):
            steps_s.append(timed(1, subject.step, subject.drain))
        self.steps_per_block = max(1, round(request["block_s"] / median(steps_s[-3:])))
        gc.collect()
        # a collection must not fall into one block and not another; between blocks it is cheap once this is frozen
        gc.disable()
        gc.freeze()
        # counted while this process alone works: between its requests others fill and clear the same GPU
        self.other_bytes += reached_bytes - reachable_bytes()
        return {
            "first_step_s": first_step_s,
            "warmup_steps": 1 + len(steps_s),
            "steps_per_block": self.steps_per_block,
            "tokens_per_step": subject.tokens_per_step,
            "losses": finite(subject.losses[: request["guard_steps"]]),
            "grad_norms": finite(subject.grad_norms[: request["guard_steps"]]),
        }

    def block(self, _request: dict[str, Any]) -> dict[str, Any]:
        assert self.subject is not None
        gc.collect()
        waited_s = self.subject.waited_s
        seconds = timed(self.steps_per_block, self.subject.step, self.subject.drain)
        return {
            "step_s": seconds / self.steps_per_block,
            "data_wait_s": (self.subject.waited_s - waited_s) / self.steps_per_block,
        }

    def rows(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._clear()
        for row in named(request["function"])(request["setting"]):
            yield {"row": row}
        yield {}

    def memory(self, _request: dict[str, Any]) -> dict[str, Any]:
        if not torch.cuda.is_initialized():
            # from /proc, because getrusage inherits the parent's peak
            status = Path("/proc/self/status").read_text().splitlines()
            peak = 1024 * int(next(line.split()[1] for line in status if line.startswith("VmHWM")))
            beyond = max(0, peak - self.resident_before_bytes)
            peaks = dict.fromkeys(("allocated_bytes", "active_bytes", "reserved_bytes"), beyond)
            return {**peaks, "other_bytes": self.resident_before_bytes}
        return {**cuda_peaks(), "other_bytes": max(0, self.other_bytes)}

    def close(self) -> None:
        if self.subject is not None:
            self.subject.close()
            self.subject = None

    def _clear(self) -> None:
        """Make room for another setting: nothing of the previous one may count or be reused."""
        self.close()
        gc.unfreeze()
        gc.enable()
        if "torch._dynamo" in sys.modules:  # importing it takes two seconds
            # a compiled block of another shape would count against the limit of recompilations
            torch._dynamo.reset()
        empty()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # restarts the peak of resident memory


def ran_out_of_memory(error: BaseException | None) -> bool:
    if error is None or isinstance(error, torch.OutOfMemoryError):
        return error is not None
    return ran_out_of_memory(error.__cause__)


def named(place: str) -> Any:
    """The object at `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def serve() -> None:
    """Answer requests until there are no more, and end the process."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print; the replies stay clean
    server = TrialServer()
    for line in sys.stdin:
        for reply in _answers(server, json.loads(line)):
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    server.close()
    os._exit(0)  # tearing down torch takes a second and saves nothing


def _answers(server: TrialServer, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        if request["do"] == "rows":
            yield from server.rows(request)
        else:
            answer = {"start": server.start, "block": server.block, "memory": server.memory}[request["do"]]
            yield answer(request)
    except (RedlineError, torch.OutOfMemoryError) as error:
        failed = "out_of_memory" if ran_out_of_memory(error) else "crashed"
        yield {"failed": failed, "error": str(error).splitlines()[0][:300]}
