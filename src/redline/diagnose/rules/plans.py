"""A run of ours against the plan that the planner would have made for it, and against the roofline: small passes, needless
recomputation, slow precision, no compiling, waits for other processes.

The roofline (plan/roofline.py) is the floor of a step; a fix cannot save more than what lies above it.
"""

import math
from dataclasses import replace

from redline.config.recipe import PlanPins, Recipe
from redline.diagnose.finding import WORTH_SAYING, Finding, found
from redline.diagnose.observed import Observed
from redline.diagnose.rules.memory import precision_found
from redline.plan import arithmetic
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.plan.roofline import roofline_tokens_per_s

PASS_S = {"eager": (0.6e-3, 0.6e-3), "compiled": (0.6e-3, 0.15e-3), "cpu": (1.2e-3, 1.3e-3)}
"""Host seconds of one forward and backward pass, and of each layer in it, that do not depend on its tokens: dispatch and
launches. CPU: measured with one and with four layers on a Xeon. GPU: about 70 operations a layer at 9 µs eager, a quarter
of it in compiled blocks."""
CPU_FLOPS = 50e9
"""What small products reach on one CPU core in fp32, where no ceiling was measured."""
LARGE_WAIT = 0.1
"""Share of the update from which on its waits for others are told. Some are left in every sharded run: the first gather of
a pass and its last reduction have nothing to hide behind."""
COMPILING = 1.3
"""What torch.compile brings at most. Measured on an H200 at 124M parameters, behind fused loss, optimiser and norms: 1.05
and 1.07 (LOG.md). This allows for models with less fused, and is not measured."""
FASTER_LINK = 0.5
"""What a link of twice the speed takes off the waits at least: half of them, and more where a part is hidden, which stays
so."""


def against_the_plan(observed: Observed) -> list[Finding]:
    """What the planner would have done otherwise. Nothing is said of examples of any length (fine-tuning): the roofline
    counts the tokens of an update from the recipe, and such a recipe does not say them."""
    recipe, plan, step_s = observed.recipe, observed.plan, observed.median("step_s")
    if recipe is None or plan is None or not step_s or not recipe.tokens_per_step:
        return []
    best, rules = unpinned(recipe, plan), (_small_passes, _recomputation, _slow_precision, _not_compiled)
    return [finding for rule in rules for finding in rule(observed, recipe, plan, best, step_s)]


def unpinned(recipe: Recipe, plan: Plan) -> Plan:
    """What the planner would do on the same hardware without pins, profile or environment."""
    return again(replace(recipe, plan=PlanPins()), plan)


def again(recipe: Recipe, plan: Plan) -> Plan:
    """A recipe planned on the same processes."""
    nodes = plan.world_size // plan.shards
    return make_plan(recipe, plan.hardware, world_size=plan.world_size, nodes=nodes)


def floor_s(recipe: Recipe, plan: Plan, **changed: str) -> float | None:
    """The update's time by the roofline, with some of the plan's values changed."""
    values = {"precision": plan.precision, "recompute": plan.recompute, **changed}
    speed = roofline_tokens_per_s(recipe, plan.hardware, plan.world_size, values)
    return recipe.tokens_per_step / speed if speed else None


def dispatch_s(recipe: Recipe, plan: Plan, passes: int) -> float:
    kind = "cpu" if plan.hardware.kind == "cpu" else "eager" if plan.compile == "off" else "compiled"
    once_s, layer_s = PASS_S[kind]
    return passes * (once_s + layer_s * recipe.model.num_layers)


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
    now_s, then_s = (dispatch_s(recipe, plan, p.accumulation) for p in (plan, best))
    if plan.hardware.kind == "cpu":
        measured = plan.hardware.measured_tflops.get("fp32")
        rate = 0.5e12 * measured if measured else CPU_FLOPS
        work_s = plan.prediction.flops_per_token * recipe.tokens_per_step / rate
        low, high = ((now_s + k * work_s) / (then_s + k * work_s) for k in (1.25, 0.8))
        fewer, each_ms = plan.accumulation - best.accumulation, now_s / plan.accumulation * 1e3
        return low, high, f"{fewer} passes fewer at {each_ms:.1f} ms each beside the arithmetic"
    if (floor := floor_s(recipe, plan)) is None:
        left_s = max(0.3 * step_s, step_s - (now_s - then_s))
        return 1.0, step_s / left_s, "launches saved; the GPU's rates are not known"
    high, said = max(1.0, step_s / max(floor, then_s)), f"to {floor * 1e3:.4g} ms an update by the roofline"
    return max(1.0, 0.85 * high), high, f"{said}, or 85 % of that speed"


def _recomputation(
    observed: Observed, recipe: Recipe, plan: Plan, best: Plan, step_s: float
) -> list[Finding]:
    """Activations computed twice although they would fit."""
    free = again(replace(recipe, plan=replace(recipe.plan, recompute=None)), plan)
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
    """The update stands still until weights are gathered or gradients reduced, and no computing hides it."""
    wait_s, mean_s, plan = observed.mean("communication_s"), observed.mean("step_s"), observed.plan
    if not wait_s or not mean_s or not observed.enough or wait_s / mean_s < LARGE_WAIT:
        return []
    share, late = wait_s / mean_s, observed.late
    low, mend, hidden = _mended(observed, share)
    saves = low * share, share
    if observed.recipe and plan:
        sent = arithmetic.traffic(
            observed.recipe.model,
            precision=plan.precision,
            accumulation=plan.accumulation,
            shards=plan.shards,
            replicas=plan.world_size // plan.shards,
        )
        received_mib, bandwidth = sent.total / 2**20, sent.total / wait_s / 1e9
        passes = f"{plan.accumulation} passes" if plan.accumulation > 1 else "one pass"
    return found("communication", locals())


def _mended(observed: Observed, share: float) -> tuple[float, str, str]:
    """What takes the waits away: the least share of them, how, and why. A process that the others wait for comes first.
    Each pass gathers and reduces everything anew, so fewer and larger ones wait less, where memory and batch allow them;
    else a faster link."""
    plan, late = observed.plan, observed.late
    if late:
        mend = f"find out why {late.process} is slow: another program there, its clocks and heat, its disk, uneven rows"
        return min(1.0, late.waited / share), mend, f"{late.process} as quick as the others, or nothing waits"
    best = unpinned(observed.recipe, plan) if observed.recipe and plan else None
    if plan and best and best.accumulation < plan.accumulation:
        left = best.accumulation / plan.accumulation
        passes = f"{best.accumulation} passes an update instead of {plan.accumulation}"
        mend = f"--set plan.micro_batch={best.micro_batch} (or no pin): {passes}, so that a gather serves more tokens"
        mend += "; then a faster link, or fewer processes"
        return 1 - left, mend, f"{left:.0%} of the passes wait as much each, or all of it is hidden"
    gloo = plan is not None and plan.hardware.kind != "cuda"
    mend = observed.trainer.options["gloo" if gloo else "communication"]
    return FASTER_LINK, mend, "a link of twice the speed, or one that is hidden altogether"
