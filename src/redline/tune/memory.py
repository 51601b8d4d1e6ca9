"""Memory of larger passes from readings of smaller ones, so that the tuner tries none that would run out of it. No torch.

    fit = fit_memory({16: memory, 32: memory})       # peaks by micro-batch
    fit.active_bytes(64), fit.reserved_bytes(64)
    fit.fits(64, capacity_bytes)                     # with a margin, and what the CUDA context and libraries take

At one sequence length active bytes are a straight line in the micro-batch, above a floor that small passes do not leave
(the update's peak). What torch reserves is more, on another line. Readings start at the second step, when gradients and
optimiser state exist. Left out: lengths that vary within a run, mixtures of experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from redline.measure.trial import PeakMemory

MARGIN = 0.03
"""Added to predicted reserved bytes before they are held against the device."""


@dataclass(frozen=True)
class Line:
    base: float
    slope: float

    def __call__(self, micro_batch: int) -> float:
        return self.base + self.slope * micro_batch


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Active bytes are a line in the micro-batch above a floor; reserved bytes are another, at least in the largest
    reading's ratio."""

    floor_bytes: float
    active: Line
    reserved: Line
    reserved_ratio: float
    other_bytes: int
    residual: float
    """How far the smallest of three readings is off the line of the others, as a share; it widens the margin."""

    def active_bytes(self, micro_batch: int) -> float:
        return max(self.floor_bytes, self.active(micro_batch))

    def reserved_bytes(self, micro_batch: int) -> float:
        return max(self.reserved(micro_batch), self.reserved_ratio * self.active_bytes(micro_batch))

    def fits(self, micro_batch: int, capacity_bytes: int) -> bool:
        """Whether it fits `capacity_bytes` with the margin."""
        reserved_bytes = self.reserved_bytes(micro_batch) * (1 + MARGIN + self.residual)
        return reserved_bytes + self.other_bytes <= capacity_bytes


def fit_memory(seen: Mapping[int, PeakMemory]) -> MemoryFit:
    """Lines through the two largest of at least two readings, and the floor under the others."""
    *smaller, before, last = sorted(seen)

    def line(name: str) -> Line:
        top, below = getattr(seen[last], name), getattr(seen[before], name)
        slope = max(0.0, (top - below) / (last - before))
        return Line(top - slope * last, slope)

    active, floor, residual = line("active_bytes"), 0.0, 0.0
    for size in smaller:
        found, expected = seen[size].active_bytes, active(size)
        if found > expected:  # the peak was elsewhere, in a part that does not grow with the micro-batch
            floor = max(floor, found)
        else:
            residual = max(residual, expected / found - 1)
    return MemoryFit(
        floor_bytes=min(floor, seen[last].active_bytes),
        active=active,
        reserved=line("reserved_bytes"),
        reserved_ratio=seen[last].reserved_bytes / seen[last].active_bytes,
        other_bytes=max(memory.other_bytes for memory in seen.values()),
        residual=residual,
    )


def divisors(count: int) -> list[int]:
    return [d for d in range(1, count + 1) if count % d == 0]
