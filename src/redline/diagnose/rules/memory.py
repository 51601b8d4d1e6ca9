"""Foreign logs against what model and GPU allow: memory that lies empty, activations computed twice, states kept on the
host, batches too small to fill the GPU, and a speed far below what the hardware does.

There is no plan to compare with, so what a change would need is estimated with the plan's arithmetic: no advice needs
more memory than there is. At the end, numbers that mean something other than they seem to: whose tokens/s, an MFU
against which peak. None of these makes anything faster, and the rules stay silent if the number of GPUs is a guess. FLOPs are
counted as 6 per parameter and token where the log does not print them, peaks are dense datasheet peaks.
"""

import math
from dataclasses import replace
from typing import Any

from redline.config.recipe import ModelConfig
from redline.diagnose.finding import WORTH_SAYING, Finding, causes, found
from redline.diagnose.observed import Facts, Observed, Step
from redline.plan import arithmetic

FULL = 0.92
"""Share of the memory up to which a change is said to fit: the estimate is good to some per cent."""
LARGER_PASSES = ((8_192, 1.25), (32_768, 1.02))
"""Tokens of a pass, and how much faster passes of 64k are (H200, 124M parameters, LOG.md)."""
TINY = 4_000
"""Tokens per update and GPU below which the fixed cost of a step decides its time."""
WELL, LOW = 0.45, 0.3
"""The MFU that a well-set-up run reaches, and the MFU below which a finding is worth it."""
LOW_ANYWHERE = 0.2
"""The same where it is counted against an A100's peak, whatever the GPU: on a 4090 (165 TFLOP/s) it is 38%."""
ANY_GPU_TFLOPS = 45.0
"""Where the GPU is not named: below this even a V100 (125) is far from busy."""
PCIE = 25e9


def shape_of(facts: Facts) -> ModelConfig | None:
    """A transformer of this size: by its printed shape, else one as wide as 128 times its layers, as most are."""
    if not facts.parameters:
        return None
    layers = facts.num_layers or max(2.0, (facts.parameters / (12 * 128**2)) ** (1 / 3))
    width = facts.hidden_size or math.sqrt(facts.parameters / (12 * layers))
    heads = max(1, round(width / 128))
    hidden = heads * max(2, 2 * round(width / heads / 2))
    sizes: dict[str, Any] = {"num_layers": round(layers), "hidden_size": hidden, "num_heads": heads}
    return ModelConfig(vocab_size=32_000, context_length=2048, ffn_size=3 * hidden, **sizes)


def recomputation(observed: Observed) -> list[Finding]:
    """Recomputation is on, and the memory may be enough to keep all activations of a pass."""
    facts, share, have = observed.facts, observed.memory_share, observed.facts.memory_bytes
    cost = causes()["needless-recomputation"]["costs"].get(facts.recompute)
    if observed.plan or not observed.steps or not cost or (share or 0.0) > 0.6:
        return []
    model, tokens, used, needed_bytes = shape_of(facts), facts.tokens_a_pass, observed.used_bytes, None
    if model and tokens and used:
        now = "selective" if facts.recompute == "selective" else "full"
        kept, every = (arithmetic.kept_bytes(model, "bf16", how, True) for how in (now, "none"))  # type: ignore[arg-type]
        needed_bytes = used + tokens * model.num_layers * (every - kept)
    (low, high), variant, strength = cost["gain"], "", 1.0
    if needed_bytes is None or have is None:
        variant, low, strength = "unknown", 1.0, 0.5 if share is None else 0.6
    elif needed_bytes > FULL * have:
        rows = max(1, math.floor((facts.micro_batch or 1) * FULL * have / needed_bytes))
        variant, low, high, strength = "smaller", 1.02, min(high, 1.25), 0.8
    selective = observed.trainer.entry.get("options", {}).get("selective")
    first, other = (f"{selective} first, then ", f"{selective}; or ") if selective else ("", "")
    of = f", of {have / 2**30:.0f}" if have else ""
    free = f" while {1 - share:.0%} of the memory is free" if share is not None else ""
    gain = low, high
    return found("needless-recomputation", cost | locals(), variant, strength=strength * cost["strength"])


def _training(observed: Observed) -> Observed:
    """The updates without the time in which they drew texts, in which nothing was trained."""

    def without(step: Step) -> Step:
        if not step.step_s or not step.generate_s:
            return step
        part = max(0.01, 1 - step.generate_s / step.step_s)
        return replace(step, step_s=step.step_s * part, mfu=step.mfu and step.mfu / part)

    return replace(observed, steps=tuple(map(without, observed.steps)))


def _from_larger_passes(tokens: float | None) -> float:
    """The most that the largest passes bring: measured at 8k and 32k tokens, interpolated by the logarithm between."""
    (few, most), (many, least) = LARGER_PASSES
    far = math.log(tokens / few) / math.log(many / few) if tokens else 0.0
    return most + (least - most) * min(1.0, max(0.0, far))


def small_passes(observed: Observed) -> list[Finding]:
    """Passes that do not fill the GPU while memory is free, or passes so small that it must be."""
    facts, share, tokens = observed.facts, observed.memory_share, observed.facts.tokens_a_pass
    mfu, high = _training(observed).median("mfu"), _from_larger_passes(tokens)
    merged = (facts.accumulation or 1.0) > 1
    busy = (mfu or 0.0) > 0.4 or high < 1 + WORTH_SAYING
    if observed.plan is not None or not observed.enough or busy:
        return []
    if share is not None and (share > 0.6 or (mfu is None and not merged)):
        return []
    if share is None and (tokens is None or tokens > 16_384 or facts.response_length):
        return []
    passes = f"passes of {tokens:,.0f} tokens are small" if tokens else "the passes are small"
    at = f" at an MFU of {mfu:.0%}" if mfu is not None else ""
    title = f"{share:.0%} of the memory is used{at}: {passes}" if share is not None else passes.capitalize()
    have_bytes = facts.memory_bytes or 0.0
    used_bytes = share * have_bytes if share is not None else None
    micro, accumulation = facts.micro_batch, facts.accumulation if merged else None
    to, gain = f" (to {2 * facts.micro_batch:.0f})" if facts.micro_batch else "", (1.0, high)
    one_pass = 0 < (facts.batch_size or 0.0) <= (facts.micro_batch or 0.0) * (facts.gpus or 0.0)
    strength = 0.45 if share is None else 0.75 if merged else 0.55
    return found("small-passes", locals(), "one_pass" if one_pass else "", strength=strength)


def tiny_batch(observed: Observed) -> list[Finding]:
    """So few tokens per update that fixed costs decide its time."""
    facts, tokens, step_s = observed.facts, observed.median("tokens"), observed.median("step_s")
    if (facts.parameters or 1e9) < 50e6 or not observed.steps:
        return []
    if not tokens and not step_s and facts.micro_batch == 1 and facts.batch_size in (None, 1):
        return found("tiny-batch", locals(), "row", strength=0.5)
    each = (tokens or 0.0) / max(1.0, (facts.gpus or 1) / (facts.model_parallel or 1))
    if not tokens or not step_s or each >= TINY or not observed.enough:
        return []
    on = f"on each of {facts.gpus:.0f} GPUs" if (facts.gpus or 1) > 1 else "an update"
    batch, speed = facts.batch_size, tokens / step_s
    gain = 1.0, min(4.0, max(1.3, TINY / each))
    return found("tiny-batch", locals(), strength=0.7)


def offload(observed: Observed) -> list[Finding]:
    """Weights or optimiser states in host memory, moved over PCIe every step, while the GPU has room."""
    facts, share = observed.facts, observed.memory_share
    if facts.offload != "on" or (share or 0.0) > 0.7 or not observed.steps:
        return []
    adapters = (facts.trained_parameters or math.inf) < 0.1 * (facts.parameters or 0.0)
    moved_bytes = 4 * facts.parameters / max(1.0, facts.gpus or 1.0) if facts.parameters else None
    pcie_s = (moved_bytes or 0.0) / PCIE
    free = f" while {1 - share:.0%} of the GPU's memory is free" if share is not None else ""
    return found("offload", locals(), strength=0.9 if (share or 1.0) < 0.5 else 0.8 if adapters else 0.7)


def slow_precision(observed: Observed) -> list[Finding]:
    """fp32 or TF32 on a GPU with bf16, or bf16 on one without; counts the matrix products alone."""
    facts, spec = observed.facts, observed.spec
    step_s, tokens = observed.median("step_s"), observed.median("tokens")
    if observed.plan is not None or spec is None or not step_s:
        return []
    if facts.precision == "bf16" and not spec.bf16_tflops:
        return found("slow-precision", locals(), "emulated", strength=0.9)
    flops = facts.flops
    now, best = facts.precision, "bf16" if spec.bf16_tflops else "fp16"
    peaks = [spec.peak_tflops(name) for name in (now, best)] if now in ("fp32", "tf32") else []
    if not tokens or not flops or len(peaks) < 2 or not all(peaks):
        return []
    now_s, then_s = (flops * tokens / (facts.gpus or 1) / (0.75e12 * (peak or math.inf)) for peak in peaks)
    return precision_found(observed, str(now), best, now_s, then_s)


def precision_found(observed: Observed, now: str, best: str, now_s: float, then_s: float) -> list[Finding]:
    """The finding on two precisions, from the difference of their floors."""
    update_s = observed.median("step_s") or math.inf
    share = min(now_s - then_s, 0.95 * update_s) / update_s
    return found("slow-precision", locals(), "own" if observed.plan else "")


def achieved(observed: Observed) -> tuple[float, str] | None:
    """TFLOP/s of one GPU, and how that is known."""
    facts, speed, gpus = observed.facts, _training(observed).tokens_per_s, observed.facts.gpus or 1.0
    per_token, step_s = facts.flops_per_token, observed.median("step_s")
    if per_token is None and facts.flops and (model := shape_of(facts)) is not None:
        per_token = facts.flops + 12 * model.num_layers * model.hidden_size * (facts.seq_len or 0.0)
    if per_token and speed:
        known = "of one GPU" if facts.gpus else "of all GPUs together"
        known += f": {per_token / 1e9:,.3g} GFLOP per token x {speed:,.0f} tokens/s"
        return per_token * speed / gpus / 1e12, known
    if facts.total_flops and step_s and observed.updates:
        total = facts.total_flops / (observed.updates * step_s) / gpus / 1e12
        return total, "of all GPUs together, by the trainer's own count"
    return None


def low_mfu(observed: Observed) -> list[Finding]:
    """A speed far below what the GPU does, and no cause in the log: how far it could go."""
    spec, rate, facts, well = observed.spec, achieved(observed), observed.facts, WELL
    small = (facts.parameters or 1e9) < 100e6  # its kernels are short on any GPU
    if observed.plan or facts.mfu_scope != "the step" or not observed.enough or (small and spec is None):
        return []
    mfu = _training(observed).median("mfu")
    if mfu and (rate is None or (spec is None and not observed.trainer.entry.get("mfu_tflops"))):
        gain = 1.0, min(10.0, well / max(mfu, 1e-3))
        low = LOW_ANYWHERE if observed.trainer.entry.get("mfu_tflops") and spec is None else LOW
        return found("low-mfu", locals(), "printed", strength=0.75) if mfu < low else []
    if rate is None:
        return []
    tflops, known = rate
    if spec is None:
        whose, gain = "" if facts.gpus else " of all GPUs together", (1.0, 4.0)
        return [] if tflops > ANY_GPU_TFLOPS else found("low-mfu", locals(), "any", strength=0.7)
    peak = spec.fp16_tflops if facts.precision == "fp16" else spec.bf16_tflops or spec.fp16_tflops
    mfu = tflops / peak
    gain = 1.0, min(10.0, well / max(mfu, 1e-3))
    return found("low-mfu", locals(), strength=0.75) if 0 < mfu < LOW else []


def wrong_throughput(observed: Observed) -> list[Finding]:
    """Printed tokens/s that step time and batch contradict."""
    printed, speed = observed.printed_tokens_per_s, observed.tokens_per_s
    if not printed or not speed or not observed.enough:
        return []
    times = speed / printed
    one_pass = round(times) == observed.facts.accumulation
    whose = "count only one pass of each update" if one_pass else "contradict step time and batch"
    return found("wrong-throughput", locals())


def over_the_peak(observed: Observed) -> list[Finding]:
    """Tokens/s that need more FLOP/s than the GPUs have, or an MFU above one."""
    facts, peak = observed.facts, observed.peak_tflops
    claimed, mfu = observed.tokens_per_s, observed.median("mfu")
    if mfu is not None and observed.trainer.entry.get("mfu_tflops"):  # nanogpt_mfu's until the GPU is known
        mfu = mfu * (facts.mfu_peak_tflops or 0.0) / peak if peak else None
    if mfu is not None and mfu > 1:
        return found("over-peak", locals(), "mfu")
    if not peak or not facts.parameters or not facts.flops or not claimed or not facts.gpus:
        return []
    needed, peak = facts.flops * claimed / 1e15, peak * facts.gpus / 1e3
    share = needed / peak
    return found("over-peak", locals(), "log", strength=0.9) if share > 1 else []


def nanogpt_mfu(observed: Observed) -> list[Finding]:
    """nanoGPT divides by an A100's peak on every GPU."""
    claimed, spec, against = observed.median("mfu"), observed.spec, observed.trainer.entry.get("mfu_tflops")
    peak = observed.peak_tflops
    if not against or claimed is None or peak == against or (not peak and claimed <= 0.6):
        return []
    right = claimed * against / peak if peak else None
    return found("nanogpt-mfu", locals(), "" if spec else "unknown", strength=1.0 if spec else 0.7)
