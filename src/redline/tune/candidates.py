"""What a search may change in a plan, with the gain that arithmetic or an earlier measurement predicts for
it. No torch.

    for candidate in candidates(recipe, plan, fixed={"precision"}, data_wait_share=0.0):
        candidate.change, candidate.predicted, candidate.reason
    changed(recipe, plan, candidate.change)      # the plan with it, its prediction made anew; MachineError
                                                 where it cannot fit

Candidates come in the order of predicted gain; those that cannot pay (below WORTH) are given with a reason
not to try them. The micro-batch has its own search (search.py). Precision is only ever changed within what
rounds: fp8 in the place of bf16.
"""

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from redline.config.recipe import PlanPins, Recipe, check
from redline.errors import ConfigError, MachineError
from redline.plan.plan import PLANNED, Plan
from redline.plan.planner import NEEDED_CAPABILITY, make_plan
from redline.plan.roofline import attainable_tokens_per_s

WORTH = 0.85
"""A candidate predicted slower than this share of the current speed is not tried."""
WAITING = 0.02
"""Share of the step spent waiting for data from which more loader threads are worth a trial."""
LESS_RECOMPUTED = {"none": (), "selective": ("none",), "full": ("none", "selective")}
"""More is never faster by itself; what memory it frees for larger passes is the planner's to weigh."""
AUTOTUNED = "max-autotune-no-cudagraphs"
MEASURED_BEFORE = {
    ("compile", "off", "default"): (
        1.07,
        "1.05 to 1.07x at 124M on an H200, more where less is fused (LOG.md)",
    ),
    ("compile", "default", "off"): (0.93, "0.93 to 0.95x at 124M on an H200 (LOG.md)"),
    ("compile", "default", AUTOTUNED): (
        1.0,
        "1.002x for gpt2-124m on an H200, after 203 s of compiling (LOG.md)",
    ),
    ("attention", "cudnn", "flash"): (0.99, "cuDNN was 0 to 3 % faster on an H200 (LOG.md)"),
    ("attention", "auto", "cudnn"): (1.01, "0 to 3 % faster than flash on an H200 (LOG.md)"),
    ("cross_entropy", "torch", "fused"): (
        1.1,
        "1.28x for gpt2-124m on an H200 (LOG.md); the head weighs less in larger models",
    ),
    ("cross_entropy", "fused", "torch"): (
        0.9,
        "0.78x for gpt2-124m on an H200 (LOG.md); the head weighs less in larger models",
    ),
}
"""Gains of one value over another where no arithmetic gives them: what was measured before, and where."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    change: dict[str, Any]
    predicted: float
    """Speed against the current plan's."""
    reason: str

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.change.items())


def candidates(
    recipe: Recipe, plan: Plan, *, fixed: Collection[str], data_wait_share: float
) -> list[Candidate]:
    """Everything but the micro-batch that could make the plan faster, the most promising first; what compiles
    for minutes last."""
    found = [
        *_known(recipe, plan),
        *_by_roofline(recipe, plan, "precision", _precisions(recipe, plan)),
        *_by_roofline(recipe, plan, "recompute", LESS_RECOMPUTED[plan.recompute]),
    ]
    if plan.loss_chunks > 1:
        found.append(
            Candidate(change={"loss_chunks": 1}, predicted=1.05, reason="the head is not computed in pieces")
        )
    if data_wait_share > WAITING:
        gain = 1 / (1 - data_wait_share)
        reason = f"{data_wait_share:.0%} of the step waits for data"
        found.append(
            Candidate(change={"loader_threads": 2 * plan.loader_threads}, predicted=gain, reason=reason)
        )
    allowed = [candidate for candidate in found if not set(candidate.change) & set(fixed)]
    return sorted(
        allowed, key=lambda candidate: (candidate.change.get("compile") == AUTOTUNED, -candidate.predicted)
    )


def changed(recipe: Recipe, plan: Plan, change: dict[str, Any]) -> Plan:
    """The plan with other values; the batch stays. Raises MachineError where arithmetic says that it cannot
    fit, ConfigError where the recipe does not allow it."""
    pins = {field.name: getattr(plan, field.name) for field in fields(PlanPins)} | change
    again = make_plan(
        check(replace(recipe, plan=PlanPins(**pins))), plan.hardware, world_size=plan.world_size
    )
    return replace(plan, **change, accumulation=again.accumulation, prediction=again.prediction)


def differing(before: Plan, after: Plan) -> dict[str, Any]:
    """The values of the second plan in which it differs from the first; accumulation follows from the
    micro-batch and is left out."""
    names = [
        name for name in PLANNED if name != "accumulation" and getattr(before, name) != getattr(after, name)
    ]
    return {name: getattr(after, name) for name in names}


def _known(recipe: Recipe, plan: Plan) -> list[Candidate]:
    cuda = plan.hardware.kind == "cuda"
    half = plan.precision in ("bf16", "fp16", "fp8")
    possible = {
        "compile": True,
        "attention": cuda and half and recipe.model.head_size % 8 == 0 and recipe.model.head_size <= 128,
        "cross_entropy": cuda and half,
    }
    found = []
    for (name, before, after), (ratio, source) in MEASURED_BEFORE.items():
        if getattr(plan, name) == before and possible[name]:
            where = "" if cuda else "; on a CPU nobody knows"
            found.append(
                Candidate(change={name: after}, predicted=ratio if cuda else 1.0, reason=source + where)
            )
    return found


def _by_roofline(recipe: Recipe, plan: Plan, name: str, values: Collection[str]) -> list[Candidate]:
    found = []
    now = {field.name: getattr(plan, field.name) for field in fields(PlanPins)}
    rate = attainable_tokens_per_s(recipe, plan.hardware, plan.world_size, now)
    for value in values:
        other = attainable_tokens_per_s(recipe, plan.hardware, plan.world_size, now | {name: value})
        if rate is None or other is None:
            found.append(
                Candidate(change={name: value}, predicted=1.0, reason="no measured rates to predict it by")
            )
        else:
            found.append(
                Candidate(change={name: value}, predicted=other / rate, reason="roofline of this hardware")
            )
    return found


def _precisions(recipe: Recipe, plan: Plan) -> list[str]:
    """fp8 where bf16 is and the hardware, the shapes and the packages allow it; never the other way: nobody
    gains accuracy unasked."""
    if (
        plan.precision != "bf16"
        or plan.hardware.kind != "cuda"
        or plan.hardware.compute_capability < NEEDED_CAPABILITY["fp8"]
    ):
        return []
    if importlib.util.find_spec("torchao") is None:
        return []
    try:
        changed(recipe, plan, {"precision": "fp8"})
    except (MachineError, ConfigError):
        return []
    return ["fp8"]
