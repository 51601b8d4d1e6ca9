"""A run of ours against the plan that the planner would have made for it, and against the roofline: small passes, needless
recomputation, slow precision, no compiling, waits for other processes.

The roofline (plan/roofline.py) is the floor of a step; a fix cannot save more than what lies above it.
"""

import math
from dataclasses import replace

from redline.config.recipe import PlanPins, Recipe
from redline.diagnose.finding import WORTH_SAYING, Finding, causes, found
from redline.diagnose.observed import Observed
from redline.diagnose.rules.memory import precision_found
from redline.plan import arithmetic
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.plan.roofline import CPU_PASS_S, launch_s, roofline_tokens_per_s

CPU_FLOPS = 50e9
"""What small products reach on one CPU core in fp32, where no ceiling was measured."""
COMPILING = 1.3
"""What torch.compile brings at most. Measured on an H200 at 124M parameters, behind fused loss, optimiser and norms: 1.05
and 1.07 (LOG.md). This allows for models with less fused, and is not measured."""
FASTER_LINK = 0.5
"""The least share of the waits that a link of twice the speed removes; a hidden part stays hidden."""


def against_the_plan(observed: Observed) -> list[Finding]:
    """What the planner would have done differently. It says nothing about examples of any length (fine-tuning): the roofline
    counts the tokens of an update from the recipe, and such a recipe does not say them."""
    recipe, plan, step_s = observed.recipe, observed.plan, observed.median("step_s")
    if recipe is None or plan is None or not step_s or not recipe.tokens_per_step:
        return []
    rules = (_small_passes, _recomputation, _slow_precision, _not_compiled)
    best = planned(recipe, plan)
    return [finding for rule in rules for finding in rule(observed, recipe, plan, best, step_s)]


def planned(recipe: Recipe, plan: Plan, pins: PlanPins | None = None) -> Plan:
    """What the planner would do on the same processes with these pins, and without profile or environment."""
    recipe, nodes = replace(recipe, plan=pins or PlanPins()), plan.world_size // plan.shards
    return make_plan(recipe, plan.hardware, world_size=plan.world_size, nodes=nodes)


def floor_s(recipe: Recipe, plan: Plan, **changed: str) -> float | None:
    """The update's time by the roofline, with some of the plan's values changed."""
    names = ("precision", "recompute", "cross_entropy")
    values = {**{name: getattr(plan, name) for name in names}, **changed}
    speed = roofline_tokens_per_s(recipe, plan.hardware, plan.world_size, values)
    return recipe.tokens_per_step / speed if speed else None


def _small_passes(observed: Observed, recipe: Recipe, plan: Plan, best: Plan, step_s: float) -> list[Finding]:
    """Passes smaller than memory and batch allow: the fixed cost of a pass is paid too often."""
    seq_len, have_bytes = recipe.data.seq_len, plan.hardware.memory_bytes
    low, high, gained = _fewer_passes(recipe, plan, best, step_s)
    if best.micro_batch <= plan.micro_batch or math.sqrt(low * high) < 1 / (1 - WORTH_SAYING):
        return []
    tokens, larger, gain = plan.micro_batch * seq_len, best.micro_batch * seq_len, (low, high)
    now, then = plan.why["micro_batch"], best.why["micro_batch"]
    used = (observed.median("memory_bytes") or 0.0) / have_bytes
    return found("small-passes", locals(), "own")


def _fewer_passes(recipe: Recipe, plan: Plan, best: Plan, step_s: float) -> tuple[float, float, str]:
    """What fewer passes bring, and why. On a CPU dispatch and arithmetic add up, so their ratio tells; on a GPU nothing
    but the roofline is left when passes are full."""
    on_cpu = plan.hardware.kind == "cpu"
    cpu_s = CPU_PASS_S[0] + CPU_PASS_S[1] * recipe.model.num_layers
    pass_s = cpu_s if on_cpu else launch_s(recipe, plan.hardware)
    now_s, then_s = plan.accumulation * pass_s, best.accumulation * pass_s
    if on_cpu:
        measured = plan.hardware.measured_tflops.get("fp32")
        rate = 0.5e12 * measured if measured else CPU_FLOPS
        work_s = plan.prediction.flops_per_token * recipe.tokens_per_step / rate
        low, high = ((now_s + k * work_s) / (then_s + k * work_s) for k in (1.25, 0.8))
        fewer = plan.accumulation - best.accumulation
        return low, high, f"{fewer} passes fewer at {pass_s * 1e3:.1f} ms each besides the arithmetic"
    if (floor := floor_s(recipe, plan)) is None:
        left_s = max(0.3 * step_s, step_s - (now_s - then_s))
        return 1.0, step_s / left_s, "launches saved; the GPU's rates are not known"
    high, said = max(1.0, step_s / max(floor, then_s)), f"to {floor * 1e3:.4g} ms per update by the roofline"
    return max(1.0, 0.85 * high), high, f"{said}, or 85% of that speed"


def _recomputation(
    observed: Observed, recipe: Recipe, plan: Plan, best: Plan, step_s: float
) -> list[Finding]:
    """Activations computed twice although they would fit."""
    free = planned(recipe, plan, replace(recipe.plan, recompute=None))
    if plan.recompute == "none" or free.recompute != "none":
        return []
    forward_s = observed.median("forward_s")
    if forward_s is None:  # a third of the arithmetic is the forward pass
        forward_s = step_s / 4 if plan.recompute == "full" else step_s / 3.3
    weights = arithmetic.parameters(recipe.model).matmul
    again_s = forward_s * arithmetic.recomputed_weights(recipe.model) / weights
    # Torch's selective checkpointing redoes the cheap operations; in eager mode its bookkeeping costs as much as it saves.
    low, high = (0.9, 1.1) if plan.recompute == "full" or plan.compile == "off" else (0.1, 0.35)
    needed_bytes, have_bytes = free.prediction.memory_bytes, plan.hardware.memory_bytes
    fits, share, update_s = needed_bytes / have_bytes, again_s / step_s, step_s
    saves = low * share, high * share
    return found("needless-recomputation", locals(), "own")


def _slow_precision(
    observed: Observed, recipe: Recipe, plan: Plan, best: Plan, step_s: float
) -> list[Finding]:
    """fp32 or TF32 on a GPU that has bf16."""
    now_s, then_s = floor_s(recipe, plan), floor_s(recipe, plan, precision=best.precision)
    slow = plan.precision in ("fp32", "tf32") and best.precision in ("bf16", "fp16")
    if not slow or not now_s or not then_s:
        return []
    return precision_found(observed, plan.precision, best.precision, now_s, then_s)


def _not_compiled(observed: Observed, recipe: Recipe, plan: Plan, best: Plan, step_s: float) -> list[Finding]:
    """A long run on a GPU without torch.compile."""
    least_s, update_s = floor_s(recipe, plan), step_s
    if plan.compile != "off" or best.compile == "off" or least_s is None or update_s < 1.15 * least_s:
        return []
    most, times = COMPILING, update_s / least_s
    high = min(most, times)
    gain = 1 + 0.25 * (high - 1), high
    return found("not-compiled", locals())


def communication(observed: Observed) -> list[Finding]:
    """The update stands still until weights are gathered or gradients reduced, and no computing hides it. A process that
    the others wait for comes first; then fewer and larger passes, as each gathers and reduces everything anew, where
    memory and batch allow them; else a faster link."""
    wait_s, mean_s, late = observed.mean("communication_s"), observed.mean("step_s"), observed.late
    recipe, plan, least = observed.recipe, observed.plan, causes()["communication"]["least"]
    if not wait_s or not mean_s or not observed.enough or wait_s / mean_s < least:
        return []
    share = wait_s / mean_s
    if recipe and plan:
        sent = arithmetic.traffic(
            recipe.model,
            precision=plan.precision,
            accumulation=plan.accumulation,
            shards=plan.shards,
            replicas=plan.world_size // plan.shards,
        )
        received_mib, bandwidth = sent.total / 2**20, sent.total / wait_s / 1e9
        passes = f"{plan.accumulation} passes" if plan.accumulation > 1 else "one pass"
    part, how = FASTER_LINK, "gloo" if plan and plan.hardware.kind != "cuda" else ""
    if late:
        part, how = min(1.0, late.waited / share), "late"
    elif recipe and plan and (best := planned(recipe, plan)).accumulation < plan.accumulation:
        left = best.accumulation / plan.accumulation
        part, how = 1 - left, "fewer_passes"
    saves = part * share, share
    return found("communication", locals(), how)
