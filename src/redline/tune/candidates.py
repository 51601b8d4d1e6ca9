"""What a search may change in a plan: the catalogue's attempts, with the gain that arithmetic or an earlier
measurement predicts. No torch.

    for candidate in candidates(recipe, plan, fixed={"precision"}, data_wait_share=0.0):
        candidate.change, candidate.predicted, candidate.reason
    changed(recipe, plan, candidate.change)     # the plan with it; MachineError if it cannot fit

Candidates come in the order of predicted gain, those that compile for minutes last. Those that cannot pay (below
WORTH) come too, with the reason. The micro-batch has its own search (search.py).
"""

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from redline.config.recipe import PlanPins, Recipe
from redline.config.rules import check
from redline.optimizations.catalogue import Attempt, catalogue
from redline.plan.plan import PLANNED, Plan
from redline.plan.planner import make_plan
from redline.plan.roofline import attainable_tokens_per_s
from redline.plan.values import why_not

WORTH = 0.85
"""A candidate predicted slower than this share of the current speed is not tried."""
WAITING = 0.02
"""Above this share of the step spent waiting for data, more loader threads are worth a trial."""
LONG_COMPILE_S = 60.0
"""What takes longer to compile is tried last."""
PINS = tuple(field.name for field in fields(PlanPins) if field.name != "slots")
"""The values of an update."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    change: dict[str, Any]
    predicted: float
    """Speed against the current plan's."""
    reason: str
    compile_s: float = 0.0

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.change.items())


def candidates(
    recipe: Recipe, plan: Plan, *, fixed: Collection[str], data_wait_share: float
) -> list[Candidate]:
    """Everything but the micro-batch that could make the plan faster, the most promising first."""
    workload = "train" if recipe.workload == "pretrain" else "finetune"
    attempts = [
        (name, attempt)
        for entry in catalogue().values()
        if workload in entry.workloads
        for attempt in entry.tries
        if attempt.workload in (None, workload)
        for name in entry.on
        if name not in fixed
    ]
    found = [_candidate(recipe, plan, name, attempt, data_wait_share) for name, attempt in attempts]
    return sorted(
        (candidate for candidate in found if candidate is not None),
        key=lambda candidate: (candidate.compile_s > LONG_COMPILE_S, -candidate.predicted),
    )


def changed(recipe: Recipe, plan: Plan, change: dict[str, Any]) -> Plan:
    """The plan with other values, same batch. MachineError if it cannot fit, ConfigError if the recipe forbids it."""
    pins = {name: getattr(plan, name) for name in PINS} | change
    pinned = check(replace(recipe, plan=PlanPins(**pins)))
    again = make_plan(pinned, plan.hardware, world_size=plan.world_size)
    return replace(plan, **change, accumulation=again.accumulation, prediction=again.prediction)


def differing(before: Plan, after: Plan) -> dict[str, Any]:
    """The second plan's values that differ from the first's, except for accumulation, which follows."""
    names = [name for name in PLANNED if getattr(before, name) != getattr(after, name)]
    return {name: getattr(after, name) for name in names if name != "accumulation"}


def _candidate(
    recipe: Recipe, plan: Plan, name: str, attempt: Attempt, data_wait_share: float
) -> Candidate | None:
    """The attempt on this plan; None if it does not apply."""
    now = getattr(plan, name)
    to = 2 * now if attempt.to == "twice" else attempt.to
    if now == to or attempt.origin not in (None, now):
        return None
    if why_not(name, to, recipe, plan.hardware, vars(plan)) is not None:
        return None
    if (name, to) == ("precision", "fp8") and importlib.util.find_spec("torchao") is None:
        return None
    if attempt.predicted_by == "data wait":
        if data_wait_share <= WAITING:
            return None
        gain, reason = 1 / (1 - data_wait_share), f"{data_wait_share:.0%} of the step waits for data"
    elif attempt.predicted_by == "roofline":
        gain, reason = _by_roofline(recipe, plan, {name: to})
    else:
        assert attempt.gain is not None, f"{name} {to}: nothing predicts it"
        gain, reason = attempt.gain, attempt.seen
        if plan.hardware.kind == "cpu":  # measured on a GPU
            gain, reason = 1.0, f"{reason}; unknown on a CPU"
    return Candidate(change={name: to}, predicted=gain, reason=reason, compile_s=attempt.compile_s)


def _by_roofline(recipe: Recipe, plan: Plan, change: dict[str, Any]) -> tuple[float, str]:
    if recipe.workload != "pretrain":
        return 1.0, "packed examples have no roofline"
    now = {name: getattr(plan, name) for name in PINS}
    rates = [
        attainable_tokens_per_s(recipe, plan.hardware, plan.world_size, values)
        for values in (now, now | change)
    ]
    if rates[0] is None or rates[1] is None:
        return 1.0, "no measured rates to predict it by"
    return rates[1] / rates[0], "roofline of this hardware"
