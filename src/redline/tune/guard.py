"""The numerics guard: does a plan compute the same training? It compares losses and gradient norms of the first
steps with a reference. No torch.

    effect = effect_of(reference_plan, plan)       # plan/values.py: the most that any changed value may do
    guard(reference, measured, effect, precision=plan.coarsest).passed

`exact`     the same sums in another order (micro-batch, recomputation, loader): within what reordering changes
            in the compute dtype.
`rounding`  other roundings of the same mathematics (precision, compiled or other kernels): within
            ROUNDING_BAND.

A plan cannot change the training itself; only a recipe can. A plan that fails is never chosen.
"""

import math
from typing import NamedTuple

from redline.measure.trial import Measurement, Pair
from redline.plan.values import Effect

EXACT_BAND = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-3, "bf16": 3e-3, "fp8": 1e-2}
"""Relative difference of a loss that another order of sums may cause: a few units in the last place, grown over the
steps."""
ROUNDING_BAND = 1e-2
"""Relative difference of a loss: TF32, bf16 and fp16 stay within it of fp32 over 30 updates (LOG.md)."""
LOGPROB_BAND = {"fp32": 1e-3, "bf16": 5e-2}
"""Mean difference of a log-probability from fp32 that generation may show: 0.1% and 5% of a probability."""
SAME_BITS = (
    "; not one bit differs from the plan before: check with `redline verify` that the change took effect"
)
NORM_FACTOR = 10.0
"""A gradient norm may differ by this many times the loss's band: no mean smooths its sum of squares."""


class Guarded(NamedTuple):
    passed: bool
    words: str
    """What was found, with the figures."""


def guard(reference: Measurement, measured: Measurement, effect: Effect, *, precision: str) -> Guarded:
    """Compare the first steps of two trials of one recipe; with no steps to compare it passes as "not checked"."""
    band = EXACT_BAND[precision] if effect == "exact" else ROUNDING_BAND
    losses = [_difference(a, b) for a, b in zip(reference.losses, measured.losses, strict=False)]
    norms = [_difference(a, b) for a, b in zip(reference.grad_norms, measured.grad_norms, strict=False)]
    if not losses:
        return Guarded(True, "not checked: no losses")
    loss, norm = max(losses), max(norms, default=0.0)
    figures = f"loss {loss:.0e}, gradient norm {norm:.0e} over {len(losses)} steps"
    if loss <= band and norm <= NORM_FACTOR * band:
        return Guarded(True, f"same training ({effect}: {figures})")
    return Guarded(False, f"refused: outside the {effect} band of {band:.0e}: {figures}")


def doubted(effect: Effect, pair: Pair) -> str:
    """What to add if a change that should round otherwise gave the very bits of the trial before it."""
    before, after = ((arm.losses, arm.grad_norms) for arm in (pair.before, pair.after))
    return SAME_BITS if effect == "rounding" and pair.before.losses and before == after else ""


def guard_logprobs(measured: Measurement, precision: str) -> Guarded:
    """For generation, whose subject keeps differences of log-probabilities from fp32 in place of losses."""
    worst = max(math.inf if difference is None else difference for difference in measured.losses)
    band = LOGPROB_BAND[precision]
    where = "within" if worst <= band else "OUTSIDE"
    return Guarded(worst <= band, f"{where} {band:g}: log-probabilities differ from fp32 by {worst:.1e}")


def _difference(reference: float | None, value: float | None) -> float:
    """Relative; infinite if only one of them is a number. Both None: an update that fp16 skipped."""
    if reference == value:
        return 0.0
    return abs(value - reference) / abs(reference) if reference and value is not None else math.inf
