"""Memory of any micro-batch from two or three small probes, so that the largest pick does not run out of it. No torch.

    fit = fit_memory(probes)                     # readings at micro-batch 1, 2, 4
    fit.active_bytes(64), fit.reserved_bytes(64)
    fit.fits(64, capacity_bytes)                 # with a margin, and what the CUDA context and libraries take
    pick_micro_batch(recipe, plan, measure, capacity_bytes=...)      # measure: a trial -> Measurement

At one sequence length active bytes are a straight line in the micro-batch, above a floor that small passes do not leave
(the update's peak). What torch reserves is more, on another line. Readings start at the second step, when gradients and
optimiser state exist. Left out: lengths that vary within a run, mixtures of experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from redline.config.recipe import Recipe
from redline.measure.trial import Measurement, PeakMemory, Timing, Trial, train_trial
from redline.plan.arithmetic import Memory
from redline.plan.plan import Plan
from redline.plan.predict import predicted_memory

MARGIN = 0.03
"""Added to predicted reserved bytes before they are held against the device."""
FURTHEST, CLOSE = 4, 2
"""The next probe may be this many times the largest so far; the pick, this many times the last one."""
ACTIVATION_SHARE = 0.05
"""Probes begin where activations are this share of the predicted peak; below it the floor hides the line."""
STEEPEST = 1.5
"""Memory grows at most this many times as fast as arithmetic says, which never underestimated it (LOG.md)."""
PROBE = Timing(blocks=0, guard_steps=2, warmup_s=0.0)
"""Two steps, nothing timed."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one micro-batch was seen to take."""

    micro_batch: int
    memory: PeakMemory


@dataclass(frozen=True)
class Line:
    base: float
    slope: float

    def __call__(self, micro_batch: int) -> float:
        return self.base + self.slope * micro_batch


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Active bytes are a line in the micro-batch above a floor; reserved bytes another, at least in the largest
    probe's ratio."""

    floor_bytes: float
    active: Line
    reserved: Line
    reserved_ratio: float
    other_bytes: int
    largest_probe: int
    residual: float
    """How far the smallest of three probes is off the line of the others, as a share; it widens the margin."""

    def active_bytes(self, micro_batch: int) -> float:
        return max(self.floor_bytes, self.active(micro_batch))

    def reserved_bytes(self, micro_batch: int) -> float:
        return max(self.reserved(micro_batch), self.reserved_ratio * self.active_bytes(micro_batch))

    def fits(self, micro_batch: int, capacity_bytes: int) -> bool:
        """Whether it fits `capacity_bytes` with the margin."""
        reserved_bytes = self.reserved_bytes(micro_batch) * (1 + MARGIN + self.residual)
        return reserved_bytes + self.other_bytes <= capacity_bytes


def fit_memory(probes: Sequence[Probe]) -> MemoryFit:
    """Lines through the two largest probes, and the floor under the others. One probe alone gives flat lines."""
    *smaller, last = sorted(probes, key=lambda probe: probe.micro_batch)
    before = smaller[-1] if smaller else last

    def line(name: str) -> Line:
        top, apart = getattr(last.memory, name), last.micro_batch - before.micro_batch
        slope = max(0.0, (top - getattr(before.memory, name)) / apart) if apart else 0.0
        return Line(top - slope * last.micro_batch, slope)

    active, floor, residual = line("active_bytes"), 0.0, 0.0
    for probe in smaller[:-1]:
        seen, expected = probe.memory.active_bytes, active(probe.micro_batch)
        if seen > expected:  # the peak was elsewhere, in a part that does not grow with the micro-batch
            floor = max(floor, seen)
        else:
            residual = max(residual, expected / seen - 1)
    return MemoryFit(
        floor_bytes=min(floor, last.memory.active_bytes),
        active=active,
        reserved=line("reserved_bytes"),
        reserved_ratio=last.memory.reserved_bytes / last.memory.active_bytes,
        other_bytes=max(probe.memory.other_bytes for probe in probes),
        largest_probe=last.micro_batch,
        residual=residual,
    )


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The largest micro-batch that should fit, and what the choice rests on."""

    micro_batch: int
    fit: MemoryFit
    probes: tuple[Probe, ...]


def with_micro_batch(
    recipe: Recipe, plan: Plan, micro_batch: int, passes: int | None = None
) -> tuple[Recipe, Plan]:
    """The recipe and the plan at another micro-batch; for a trial, `passes` cuts the update short."""
    short = recipe if passes is None else recipe.with_rows(micro_batch * passes)
    accumulation = short.rows_per_update // (micro_batch * plan.world_size)
    return short, replace(plan, micro_batch=micro_batch, accumulation=accumulation)


def probe(
    recipe: Recipe, plan: Plan, micro_batch: int, measure: Callable[[Trial], Measurement]
) -> Measurement:
    """Two steps of two passes; two, because accumulating gradients takes memory too."""
    passes = min(2, recipe.rows_per_update // plan.world_size // micro_batch)
    return measure(train_trial(*with_micro_batch(recipe, plan, micro_batch, passes), PROBE))


def pick_micro_batch(
    recipe: Recipe, plan: Plan, measure: Callable[[Trial], Measurement], *, capacity_bytes: int
) -> Pick | None:
    """Probe, fit, and pick the largest micro-batch that fits; None if not even the first could be probed."""
    sizes = divisors(recipe.rows_per_update // plan.world_size)
    probes: list[Probe] = []
    size: int | None = _first_probe(recipe, plan, sizes)
    while size is not None:
        measured = probe(recipe, plan, size, measure)
        if measured.outcome != "ok" or measured.memory is None:
            break
        probes.append(Probe(micro_batch=size, memory=measured.memory))
        size = _next_probe(probes, sizes, capacity_bytes)
        # one reading has no slope: take that of the arithmetic
        if size is not None and len(probes) == 1:
            small, large = (arithmetic_memory(recipe, plan, s).total for s in (probes[0].micro_batch, size))
            taken = measured.memory.reserved_bytes + measured.memory.other_bytes
            size = size if taken + STEEPEST * (large - small) <= capacity_bytes else None
    if not probes:
        return None
    fit = fit_memory(probes)
    reach = CLOSE * fit.largest_probe if len(probes) > 1 else fit.largest_probe
    fitting = (s for s in sizes if s <= reach and fit.fits(s, capacity_bytes))
    best = max(fitting, default=probes[0].micro_batch)
    return Pick(micro_batch=best, fit=fit, probes=tuple(probes))


def divisors(count: int) -> list[int]:
    """In rising order."""
    return [d for d in range(1, count + 1) if count % d == 0]


def arithmetic_memory(recipe: Recipe, plan: Plan, micro_batch: int) -> Memory:
    """What the planner's arithmetic says of the plan at another micro-batch."""
    values = {**vars(plan), "micro_batch": micro_batch}
    return predicted_memory(recipe, plan.hardware, plan.world_size, values)


def _first_probe(recipe: Recipe, plan: Plan, sizes: Sequence[int]) -> int:
    """The smallest whose activations show beside the rest."""
    for size in sizes:
        parts = arithmetic_memory(recipe, plan, size)
        if parts.activations + parts.logits >= ACTIVATION_SHARE * parts.total:
            return size
    return sizes[-1]


def _next_probe(probes: Sequence[Probe], sizes: Sequence[int], capacity_bytes: int) -> int | None:
    """Twice the last until there are three; then towards half of the largest that fits, close to the pick."""
    fit, last = fit_memory(probes), probes[-1].micro_batch
    if len(probes) < 3:
        size = next((s for s in sizes if s >= 2 * last), None)
        return size if size is not None and fit.fits(size, capacity_bytes) else None
    largest = max((s for s in sizes if fit.fits(s, capacity_bytes)), default=last)
    if largest <= CLOSE * last:
        return None
    larger = [s for s in sizes if last < s <= largest]
    towards = [s for s in larger if s <= min(FURTHEST * last, largest // CLOSE)]
    return max(towards, default=larger[0])  # divisors that lie far apart: the next one
