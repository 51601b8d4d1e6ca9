"""A run against the plan that the planner would have made for it, and against the roofline: small passes,
needless recomputation, slow precision, no compiling, a GPU that waits for the host, memory that lies empty.

The roofline (plan/roofline.py) is the floor of a step; a fix cannot save more than what lies above it.
"""

import math
from dataclasses import replace

from redline.config.recipe import PlanPins, Recipe
from redline.diagnose.causes import COMPILING, LAUNCH_BOUND, WORTH_SAYING, enough, saved
from redline.diagnose.finding import Evidence, Finding, Gain
from redline.diagnose.observed import Observed, Step
from redline.machine.specs import SPECS
from redline.plan import arithmetic
from redline.plan.plan import Plan
from redline.plan.planner import THIN_PASS_TOKENS, make_plan
from redline.plan.roofline import roofline_tokens_per_s

PASS_S = {"eager": (0.6e-3, 0.6e-3), "compiled": (0.6e-3, 0.15e-3), "cpu": (1.2e-3, 1.3e-3)}
"""Host seconds of one forward and backward pass, and of each layer in it, that do not depend on its tokens:
dispatch and launches. CPU: measured with one and with four layers on a Xeon. GPU: about 70 operations a layer
at 9 µs eager, a quarter of it in compiled blocks."""
CPU_FLOPS = 50e9
"""What small products reach on one CPU core in fp32, where no ceiling was measured."""
LAUNCH_S, LAUNCH_QUEUE = 9e-6, 1000
"""Host seconds of one operation, and how many launches CUDA holds before the host must wait for one to
finish."""
ELSEWHERE = {
    "full": (1.15, 1.33, "every block computed twice, a third of the arithmetic more than without"),
    "on": (1.15, 1.33, "every block computed twice, a third of the arithmetic more than without"),
    "selective": (
        1.02,
        1.15,
        "a part of every block computed twice, its cheap operations and about half of its products",
    ),
}
"""What recomputation costs where no plan says what would fit: the gain of turning it off, and why. By
arithmetic, not measured."""
LARGER_PASSES = ((8_192, 1.25), (32_768, 1.02))
"""Tokens of a pass, and how much faster passes of 64k are (H200, 124M parameters: 427k, 524k and 533k
tokens/s, LOG.md)."""


def _given(observed: Observed) -> tuple[Recipe, Plan, float] | None:
    step_s = observed.median("step_s")
    if observed.recipe is None or observed.plan is None or not step_s:
        return None
    return observed.recipe, observed.plan, step_s


def unpinned(recipe: Recipe, plan: Plan) -> Plan:
    """What the planner would do on the same hardware without pins, profile or environment."""
    return make_plan(replace(recipe, plan=PlanPins()), plan.hardware, world_size=plan.world_size)


def floor_s(recipe: Recipe, plan: Plan, **changed: str) -> float | None:
    """The update's time by the roofline, with some of the plan's values changed."""
    values = {"precision": plan.precision, "recompute": plan.recompute, **changed}
    speed = roofline_tokens_per_s(recipe, plan.hardware, plan.world_size, values)
    return recipe.tokens_per_step / speed if speed else None


def dispatch_s(recipe: Recipe, plan: Plan, passes: int) -> float:
    kind = "cpu" if plan.hardware.kind == "cpu" else "eager" if plan.compile == "off" else "compiled"
    once_s, layer_s = PASS_S[kind]
    return passes * (once_s + layer_s * recipe.model.num_layers)


def small_passes(observed: Observed) -> list[Finding]:
    """Passes smaller than memory and batch allow: the fixed cost of a pass is paid too often."""
    if (given := _given(observed)) is None:
        return []
    recipe, plan, step_s = given
    best = unpinned(recipe, plan)
    if best.micro_batch <= plan.micro_batch:
        return []
    gain = _fewer_passes(recipe, plan, best, step_s)
    if gain.middle < 1 / (1 - WORTH_SAYING):
        return []
    tokens, seq_len, memory = (
        plan.micro_batch * recipe.data.seq_len,
        recipe.data.seq_len,
        observed.median("memory_bytes") or 0.0,
    )
    return [
        Finding(
            cause="small-passes",
            kind="cause",
            title=(
                f"{plan.accumulation} passes of {tokens:,} tokens an update; {best.accumulation} of"
                f" {best.micro_batch * seq_len:,} fit"
            ),
            evidence=(
                Evidence(
                    "micro-batch",
                    plan.micro_batch,
                    f"sequences ({plan.why['micro_batch'].source}: {plan.why['micro_batch'].reason})",
                ),
                Evidence("would fit", best.micro_batch, f"sequences: {best.why['micro_batch'].reason}"),
                Evidence(
                    "memory in use",
                    memory / plan.hardware.memory_bytes,
                    f"of {plan.hardware.memory_bytes / 2**30:.0f} GiB",
                ),
            ),
            fix=f"--set plan.micro_batch={best.micro_batch} (or no pin: the planner takes it)",
            gain=gain,
            confidence=0.85 if plan.hardware.kind == "cuda" else 0.8,
        )
    ]


def _fewer_passes(recipe: Recipe, plan: Plan, best: Plan, step_s: float) -> Gain:
    """On a CPU dispatch and arithmetic add up, so their ratio tells; on a GPU nothing but the roofline is
    left when passes are full."""
    now_s, then_s = (dispatch_s(recipe, plan, p.accumulation) for p in (plan, best))
    if plan.hardware.kind == "cpu":
        rate = (
            0.5e12 * plan.hardware.measured_tflops["fp32"]
            if "fp32" in plan.hardware.measured_tflops
            else CPU_FLOPS
        )
        work_s = plan.prediction.flops_per_token * recipe.tokens_per_step / rate
        low, high = ((now_s + k * work_s) / (then_s + k * work_s) for k in (1.25, 0.8))
        return Gain(
            low,
            high,
            f"{plan.accumulation - best.accumulation} passes fewer at {now_s / plan.accumulation * 1e3:.1f}"
            " ms each beside the arithmetic",
        )
    floor = floor_s(recipe, plan)
    if floor is None:
        return Gain(
            1.0,
            step_s / max(0.3 * step_s, step_s - (now_s - then_s)),
            "launches saved; the GPU's rates are not known",
        )
    high = max(1.0, step_s / max(floor, then_s))
    return Gain(
        max(1.0, 0.85 * high),
        high,
        f"to {floor * 1e3:.4g} ms an update by the roofline, or 85 % of that speed",
    )


def recomputation(observed: Observed) -> list[Finding]:
    """Activations computed twice although they would fit."""
    if (given := _given(observed)) is None:
        return _recomputation_elsewhere(observed)
    recipe, plan, step_s = given
    free = make_plan(
        replace(recipe, plan=replace(recipe.plan, recompute=None)), plan.hardware, world_size=plan.world_size
    )
    if plan.recompute == "none" or free.recompute != "none":
        return []
    forward_s = observed.median("forward_s")
    if forward_s is None:  # a third of the arithmetic is the forward pass
        forward_s = step_s / 4 if plan.recompute == "full" else step_s / 3.3
    again_s = (
        forward_s * arithmetic.recomputed_weights(recipe.model) / arithmetic.parameters(recipe.model).matmul
    )
    # Torch's selective checkpointing redoes the cheap operations; in eager mode its bookkeeping costs as much
    # as it saves.
    low, high = (0.9, 1.1) if plan.recompute == "full" or plan.compile == "off" else (0.1, 0.35)
    predicted = free.prediction.memory_bytes
    return [
        Finding(
            cause="needless-recomputation",
            kind="cause",
            title=(
                f"Recomputation is {plan.recompute}, without it {predicted / plan.hardware.memory_bytes:.0%}"
                " of the memory suffices"
            ),
            evidence=(
                Evidence(
                    "memory without it",
                    predicted / 2**30,
                    f"GiB predicted, of {plan.hardware.memory_bytes / 2**30:.0f}",
                ),
                Evidence(
                    "computed again",
                    again_s * 1e3,
                    "ms an update: the blocks' share of the forward pass, but for their last product",
                ),
                Evidence("update", step_s * 1e3, "ms, median"),
            ),
            fix="--set plan.recompute=none (or no pin)",
            gain=saved(
                step_s,
                low * again_s / step_s,
                high * again_s / step_s,
                "the blocks' forward pass once instead of twice",
            ),
            confidence=0.9,
        )
    ]


def _recomputation_elsewhere(observed: Observed) -> list[Finding]:
    """A document or a foreign log: recomputation on, and a memory that is mostly empty."""
    used, have, kind = observed.median("memory_bytes"), observed.facts.memory_bytes, observed.facts.recompute
    if kind not in ELSEWHERE:
        return []
    if observed.format == "document":
        return _recomputation_among_changes(observed)
    share = used / have if used and have else None
    if share is None or share > 0.5:
        return []
    low, high, costs = ELSEWHERE[kind]
    flag = (
        "--activation_checkpoint.mode none"
        if observed.format == "torchtitan"
        else "gradient_checkpointing=False"
    )
    named = {"full": "Full activation", "selective": "Selective activation", "on": "Gradient"}[kind]
    return [
        Finding(
            cause="needless-recomputation",
            kind="cause",
            title=f"{named} checkpointing is on while {1 - share:.0%} of the memory is free",
            evidence=(
                Evidence("memory in use", share, "of the device's"),
                Evidence("checkpointing", kind, costs),
            ),
            fix=f"turn it off ({flag}); first see that the memory suffices, `redline plan` predicts it",
            gain=Gain(low, high, f"{costs}; less where the step is bound by something else"),
            confidence=0.5 if kind == "selective" else 0.8,
        )
    ]


def _recomputation_among_changes(observed: Observed) -> list[Finding]:
    """A page that turns recomputation on, and says that memory was not short before. What it would take after
    the other changes is not known, so nothing is promised."""
    claims = [c for c in observed.claims if c.name == "memory_share" and c.before]
    share = next((c.before.high / 100 for c in claims if c.before), None)
    if share is None or share > 0.5:
        return []
    after = next((c.after for c in claims if c.after), None)
    return [
        Finding(
            cause="needless-recomputation",
            kind="cause",
            title=(
                f"Gradient checkpointing is among the changes, where {share:.0%} of the memory was in use"
                " before them"
            ),
            evidence=(
                Evidence("memory before", share, "of the device's"),
                Evidence(
                    "memory after",
                    f"{after} %" if after else "not stated",
                    "with larger passes and checkpointing together",
                ),
                Evidence("gradient checkpointing", "on", ELSEWHERE["on"][2]),
            ),
            fix=(
                "take the larger passes without it (gradient_checkpointing=False), and turn it on only if"
                " they do not fit; `redline plan` predicts it"
            ),
            gain=None,
            confidence=0.6,
        )
    ]


def slow_precision(observed: Observed) -> list[Finding]:
    """fp32 or TF32 on a GPU that has bf16."""
    if (given := _given(observed)) is None:
        return _precision_elsewhere(observed)
    recipe, plan, step_s = given
    best = unpinned(recipe, plan).precision
    if plan.precision not in ("fp32", "tf32") or best not in ("bf16", "fp16"):
        return []
    now_s, then_s = floor_s(recipe, plan), floor_s(recipe, plan, precision=best)
    if now_s is None or then_s is None:
        return []
    return _slow_precision(
        plan.precision,
        best,
        now_s,
        then_s,
        step_s,
        "by the roofline",
        f"--set plan.precision={best} (or no pin)",
    )


def _precision_elsewhere(observed: Observed) -> list[Finding]:
    """The same without a plan: the matrix products alone, at the share of the datasheet that
    Hardware.rate_tflops assumes."""
    facts, spec, step_s, tokens = (
        observed.facts,
        SPECS.get(observed.facts.gpu or ""),
        observed.median("step_s"),
        observed.median("tokens"),
    )
    if (
        spec is None
        or facts.precision not in ("fp32", "tf32")
        or not facts.flops_per_token
        or not step_s
        or not tokens
    ):
        return []
    best = "bf16" if spec.bf16_tflops else "fp16"
    now, then = spec.peak_tflops(facts.precision), spec.peak_tflops(best)
    if now is None or then is None:
        return []
    now_s, then_s = (
        facts.flops_per_token * tokens / (facts.gpus or 1) / (0.75e12 * peak) for peak in (now, then)
    )
    fix = (
        f"torch.autocast('cuda', torch.{'bfloat16' if best == 'bf16' else 'float16'}) around the forward pass"
        f" (Trainer: {best}=True)"
    )
    return _slow_precision(
        facts.precision, best, now_s, then_s, step_s, "at 75 % of the datasheet's rate", fix
    )


def _slow_precision(
    now: str, best: str, now_s: float, then_s: float, step_s: float, by: str, fix: str
) -> list[Finding]:
    less_s = min(now_s - then_s, 0.95 * step_s)
    if less_s < WORTH_SAYING * step_s:
        return []
    return [
        Finding(
            cause="slow-precision",
            kind="cause",
            title=f"The matrix products run in {now}; this GPU has {best}",
            evidence=(
                Evidence(f"floor in {now}", now_s * 1e3, f"ms an update {by}"),
                Evidence(f"floor in {best}", then_s * 1e3, f"ms an update {by}"),
                Evidence("update", step_s * 1e3, "ms, median"),
            ),
            fix=fix,
            gain=saved(step_s, 0.85 * less_s / step_s, less_s / step_s, "the difference of the two floors"),
            confidence=0.85,
        )
    ]


def host_bound(observed: Observed) -> list[Finding]:
    """The host takes as long to issue the update as the GPU to run it: launches, or a wait for the GPU inside
    the update."""
    if (given := _given(observed)) is None or observed.plan is None or observed.plan.hardware.kind != "cuda":
        return []
    recipe, plan, step_s = given
    issue_s, floor = observed.median("issue_s"), floor_s(recipe, plan)
    if floor is None or step_s < 1.2 * floor:
        return []
    launches_s = dispatch_s(recipe, plan, plan.accumulation)
    busy = issue_s / step_s if issue_s else launches_s / step_s
    if busy < LAUNCH_BOUND:
        return []
    tokens = plan.micro_batch * recipe.data.seq_len
    evidence = (
        Evidence(
            "host issues the update", (issue_s or launches_s) * 1e3, "ms" if issue_s else "ms, estimated"
        ),
        Evidence("update", step_s * 1e3, "ms, median"),
        Evidence("floor", floor * 1e3, "ms by the roofline"),
        Evidence("tokens a pass", tokens, f"tokens; below {THIN_PASS_TOKENS:,} a GPU starves"),
    )
    waits = issue_s is not None and launches_s < 0.5 * issue_s
    if waits and (launches_s / LAUNCH_S > LAUNCH_QUEUE or plan.precision == "fp16"):
        return []  # the host waits for a place in the queue, or for fp16's check: not a mistake in the loop
    if waits:
        gain = saved(
            step_s,
            0.0,
            min(launches_s, step_s - floor) / step_s,
            "the launches of a pass hidden behind the one before",
        )
        title = (
            f"The host waits inside the update: it issues for {busy:.0%} of the time, its launches need"
            f" {launches_s / step_s:.0%}"
        )
        fix = (
            "find the wait (.item(), .cpu(), a printed tensor, torch.cuda.synchronize()):"
            " torch.cuda.set_sync_debug_mode('warn') names it"
        )
        return [
            Finding(
                cause="sync", kind="cause", title=title, evidence=evidence, fix=fix, gain=gain, confidence=0.7
            )
        ]
    high = step_s / max(floor, 0.1 * step_s)
    fix = (
        "--set plan.compile=default"
        if plan.compile == "off"
        else "larger passes: a larger --set plan.micro_batch, or a larger batch where the recipe allows it"
    )
    gain = Gain(max(1.0, 0.6 * high), high, f"towards the roofline's {floor * 1e3:.4g} ms")
    title = f"The GPU waits for the host: issuing the update takes {busy:.0%} of its time"
    return [
        Finding(
            cause="launch-bound",
            kind="cause",
            title=title,
            evidence=evidence,
            fix=fix,
            gain=gain,
            confidence=0.75,
        )
    ]


def not_compiled(observed: Observed) -> list[Finding]:
    """A long run on a GPU without torch.compile."""
    if (given := _given(observed)) is None:
        return []
    recipe, plan, step_s = given
    best, floor = unpinned(recipe, plan), floor_s(recipe, plan)
    if plan.compile != "off" or best.compile == "off" or floor is None or step_s < 1.15 * floor:
        return []
    high = min(COMPILING[1], step_s / floor)
    return [
        Finding(
            cause="not-compiled",
            kind="cause",
            title=f"torch.compile is off and the update takes {step_s / floor:.1f} times its floor",
            evidence=(
                Evidence("update", step_s * 1e3, "ms, median"),
                Evidence("floor", floor * 1e3, "ms by the roofline"),
            ),
            fix="--set plan.compile=default (or no pin)",
            gain=Gain(
                1 + 0.25 * (high - 1),
                high,
                f"a quarter of the way to the floor or all of it, {COMPILING[1]} times at most; 1.07 times"
                " measured on an H200 at 124M parameters, 1.17 times its floor",
            ),
            confidence=0.75,
        )
    ]


def _trained(step: Step) -> Step:
    """The update without the time in which it drew texts: over all of it, an MFU counts that as time in which
    nothing was trained."""
    if not step.generate_s or not step.step_s:
        return step
    trained_s = max(0.01 * step.step_s, step.step_s - step.generate_s)
    return replace(step, step_s=trained_s, mfu=step.mfu * step.step_s / trained_s if step.mfu else step.mfu)


def _training(observed: Observed) -> Observed:
    return replace(observed, steps=tuple(_trained(step) for step in observed.steps))


def _from_larger_passes(tokens: float | None) -> float:
    """What the largest passes bring over those of some tokens, at most: as measured at 8k and 32k, in between
    by the logarithm."""
    (few, most), (many, least) = LARGER_PASSES
    if tokens is None:
        return most
    return most + (least - most) * min(1.0, max(0.0, math.log(tokens / few) / math.log(many / few)))


def empty_memory(observed: Observed) -> list[Finding]:
    """A foreign log that shows little memory in use and a low MFU: passes are too small. Where it says how
    many tokens a pass has, they may be enough."""
    used, have, mfu = (
        observed.median("memory_bytes"),
        observed.facts.memory_bytes,
        _training(observed).median("mfu"),
    )
    if (
        observed.plan is not None
        or not used
        or not have
        or used / have > 0.6
        or (mfu or 0.0) > 0.4
        or mfu is None
        or not enough(observed)
    ):
        return []
    micro, seq_len = observed.facts.micro_batch, observed.facts.seq_len
    tokens = micro * seq_len if micro and seq_len else None
    high = _from_larger_passes(tokens)
    if high < 1 + WORTH_SAYING:
        return []
    passes = f"passes of {tokens:,.0f} tokens are small" if tokens else "the passes are small"
    return [
        Finding(
            cause="small-passes",
            kind="cause",
            title=(
                f"{used / have:.0%} of the memory is used at an MFU of {mfu:.0%}: {passes}, or something else"
                " holds it up"
            ),
            evidence=(
                Evidence("memory", used / 2**30, f"GiB of {have / 2**30:.0f}"),
                Evidence("micro-batch", micro if micro else "not in the log", "sequences a GPU"),
            ),
            fix=_double(observed),
            gain=Gain(
                1.0,
                high,
                "on an H200 at 124M parameters 8k tokens a pass give 80 % of the speed of 64k, and 32k 98 %",
            ),
            confidence=0.4,
        )
    ]


def _double(observed: Observed) -> str:
    """How to make passes larger. Where an update is one pass already, that makes the batch larger too."""
    facts = observed.facts
    to = f" (to {2 * facts.micro_batch:.0f})" if facts.micro_batch else ""
    flag = " with --training.local_batch_size" if observed.format == "torchtitan" else ""
    if (
        facts.batch_size
        and facts.micro_batch
        and facts.gpus
        and facts.batch_size <= facts.micro_batch * facts.gpus
    ):
        return (
            f"double the micro-batch{to}{flag}. An update is one pass already, so the batch doubles with it,"
            " which is another training: half as many GPUs keep it the same"
        )
    return f"double the micro-batch{to}{flag} and halve the accumulation: the batch stays the same"


def low_mfu(observed: Observed) -> list[Finding]:
    """A foreign log that shows a low speed and no cause: what is missing, and how far it could go."""
    spec, facts, speed = SPECS.get(observed.facts.gpu or ""), observed.facts, _training(observed).tokens_per_s
    peak = (spec.bf16_tflops or spec.fp16_tflops) if spec else None
    per_token = facts.flops_per_token or (6 * facts.parameters if facts.parameters else None)
    if (
        observed.plan is not None
        or peak is None
        or per_token is None
        or speed is None
        or observed.format == "verl"
    ):
        return []
    mfu = per_token * speed / (peak * 1e12 * (facts.gpus or 1))
    if mfu >= 0.3 or mfu <= 0 or not enough(observed):
        return []
    return [
        Finding(
            cause="low-mfu",
            kind="cause",
            title=(
                f"The run reaches {mfu:.1%} of the GPU's bf16 peak, and the log does not say where the time"
                " goes"
            ),
            evidence=(
                Evidence(
                    "speed",
                    speed,
                    "tokens/s, all GPUs" + (", generation taken off" if observed.share("generate_s") else ""),
                ),
                Evidence("FLOPs per token", per_token / 1e9, "GFLOP"),
                Evidence("peak", peak * (facts.gpus or 1), "TFLOP/s dense bf16"),
            ),
            fix=(
                "look in this order: data loading (wait per step), padding, precision (bf16), torch.compile,"
                " tokens a pass; `redline plan` says what the model could reach on this GPU"
            ),
            gain=Gain(1.0, min(10.0, 0.45 / mfu), "to the 45 % that a well-set-up run of this kind reaches"),
            confidence=0.3,
        )
    ]


RULES = (small_passes, recomputation, slow_precision, host_bound, not_compiled, empty_memory, low_mfu)
