"""The always-on instruments: loss, gradient norm, time, memory and data wait of every update, without making the GPU wait.

    instruments.push(step, update, ...)      # enqueues a copy of two numbers and an event behind the update
    for line in instruments.ready(): ...     # lines of updates that are finished; the newest stays in flight

On a GPU the line of an update is read while the next one runs, so the host is never more than one update ahead and the GPU never
idles. Times are those of the GPU's own clock between the ends of two updates.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.config.recipe import Recipe
from redline.machine.telemetry import GpuTelemetry, process_rss_bytes
from redline.plan.plan import Plan
from redline.train.step import Update

GAUGES_EVERY_S = 1.0


@dataclass
class _InFlight:
    facts: dict[str, Any]
    numbers: Tensor
    end: torch.cuda.Event | None
    ended_at: float


class Instruments:
    def __init__(self, recipe: Recipe, plan: Plan, device: torch.device) -> None:
        self.tokens_per_step = recipe.tokens_per_step
        self.flops_per_step = plan.prediction.flops_per_token * recipe.tokens_per_step / plan.world_size
        self.peak_tflops = plan.hardware.peak_tflops.get(plan.precision if plan.precision != "fp8" else "bf16")
        self.measured_tflops = plan.hardware.measured_tflops.get(plan.precision)
        self.device = device
        self._flying: deque[_InFlight] = deque()
        self._telemetry = GpuTelemetry(device.index or 0) if device.type == "cuda" else None
        self._memory_bytes, self._gauges_at = 0, -math.inf
        self.restart()

    def restart(self) -> None:
        """Begin timing afresh, after something that is not part of a step (a validation, a checkpoint's copy)."""
        assert not self._flying, "lines in flight would be timed from the wrong moment"
        self._last_end = self._event()
        self._last_at = time.perf_counter()

    def push(self, facts: dict[str, Any], update: Update) -> None:
        """Note an update that was just enqueued. `facts` goes into its line as it is."""
        numbers = torch.stack([update.loss, update.grad_norm.to(update.loss.dtype)])
        if self.device.type == "cuda":
            numbers = torch.empty(2, pin_memory=True).copy_(numbers, non_blocking=True)
        self._flying.append(_InFlight(facts, numbers, self._event(), time.perf_counter()))

    def ready(self, *, drain: bool = False) -> list[dict[str, Any]]:
        """Lines of finished updates in order; all of them with `drain`, else all but the newest (on a GPU)."""
        leave = 0 if drain or self.device.type != "cuda" else 1
        lines = []
        while len(self._flying) > leave:
            lines.append(self._line(self._flying.popleft()))
        return lines

    def _line(self, flight: _InFlight) -> dict[str, Any]:
        if flight.end is not None and self._last_end is not None:
            flight.end.synchronize()
            step_s = self._last_end.elapsed_time(flight.end) / 1e3
        else:
            step_s = flight.ended_at - self._last_at
        self._last_end, self._last_at = flight.end, flight.ended_at
        loss, grad_norm = flight.numbers.tolist()
        tflops = self.flops_per_step / step_s / 1e12
        return {
            "step": flight.facts.pop("step"),
            "loss": loss,
            "grad_norm": grad_norm,
            "step_s": step_s,
            "tokens_per_s": self.tokens_per_step / step_s,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "ceiling_share": tflops / self.measured_tflops if self.measured_tflops else None,
            **flight.facts,
            **self._gauges(),
        }

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gauges(self) -> dict[str, float]:
        """Peak memory, and at most once in GAUGES_EVERY_S the GPU's own counters: torch and NVML take part of a millisecond to answer,
        which a run of very short steps would feel."""
        if self._telemetry is None:
            return {"memory_bytes": process_rss_bytes()}
        if (now := time.perf_counter()) - self._gauges_at < GAUGES_EVERY_S:
            return {"memory_bytes": self._memory_bytes}
        self._memory_bytes, self._gauges_at = torch.cuda.max_memory_allocated(self.device), now
        return {"memory_bytes": self._memory_bytes, **self._telemetry.read()}
