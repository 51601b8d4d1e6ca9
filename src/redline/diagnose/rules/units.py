"""Numbers of a log that mean something else than they seem to: tokens/s of whom, an MFU against which peak. Arithmetic;
none of these makes anything faster.

FLOPs are counted as 6 per parameter and token where the log does not print them, peaks are dense datasheet peaks. Nothing
is said where the number of GPUs is a guess.
"""

from redline.diagnose.finding import Finding, found
from redline.diagnose.observed import Observed

ALIKE = (0.8, 1.25)
"""Two ways to count FLOPs differ by as much."""


def _peak(observed: Observed) -> float | None:
    spec = observed.spec
    return (spec.bf16_tflops or spec.fp16_tflops) if spec else None


def wrong_throughput(observed: Observed) -> list[Finding]:
    """Printed tokens/s that step time and batch contradict."""
    printed, speed = observed.printed_tokens_per_s, observed.tokens_per_s
    if not printed or not speed or not observed.enough:
        return []
    times = speed / printed
    one_pass = observed.facts.accumulation and round(times) == observed.facts.accumulation
    whose = "one pass of an update over the time of all" if one_pass else "not those of step time and batch"
    return found("wrong-throughput", observed, printed=printed, whose=whose, times=times)


def over_the_peak(observed: Observed) -> list[Finding]:
    """Tokens/s that need more FLOP/s than the GPUs have, or an MFU above one."""
    facts, peak, speed = observed.facts, _peak(observed), observed.tokens_per_s
    claimed = observed.median("mfu")
    if observed.format in ("document", "run"):
        return []
    if claimed is not None and observed.trainer.entry.get(
        "mfu_tflops"
    ):  # nanogpt_mfu's until the GPU is known
        claimed = claimed * (facts.mfu_peak_tflops or 0.0) / peak if peak else None
    if claimed is not None and claimed > 1:
        return found("over-peak", observed, "mfu", mfu=claimed, possible="40 to 60 %")
    if peak is None or not facts.parameters or not speed or not facts.gpus:
        return []
    needed, have = 6 * facts.parameters * speed / 1e15, peak * facts.gpus / 1e3
    if needed <= have:
        return []
    shown = {"claimed": speed, "needed": needed, "share": needed / have, "peak": have, "gpus": facts.gpus}
    shown |= {"parameters": facts.parameters}
    return found("over-peak", observed, "log", **shown, board=facts.gpu, strength=0.9)


def mfu_by_arithmetic(observed: Observed) -> list[Finding]:
    """An MFU that does not follow from the log's own tokens/s: another peak, or FLOPs counted more than once."""
    facts, claimed, speed = observed.facts, observed.median("mfu"), observed.tokens_per_s
    peak = _peak(observed) or facts.mfu_peak_tflops
    per_token = facts.flops_per_token or 6 * (facts.parameters or 0.0)
    judged = facts.mfu_scope == "the step" and observed.format not in ("run", "document")
    if not judged or not claimed or claimed > 1 or not speed or not peak or not per_token:
        return []
    right = per_token * speed / (peak * 1e12 * (facts.gpus or 1))
    shown = {"claimed": claimed, "speed": speed, "right": right}
    if observed.trainer.entry.get("mfu_tflops") or (facts.gpus is None and right <= 1):
        return []
    if facts.gpus is None:  # tokens/s that one GPU cannot do, beside an MFU that it could
        return found("mfu-mismatch", observed, "several", **shown, strength=0.6)
    ratio = claimed / right
    if ALIKE[0] <= ratio <= ALIKE[1] or right > 1:
        return []
    shown |= {"ratio": ratio, "gflop": per_token / 1e9, "peak": peak * facts.gpus}
    thrice = 2.6 <= ratio <= 3.4
    cause, strength = ("mfu-6n-thrice", 1.0) if thrice else ("mfu-mismatch", 0.6)
    return found(cause, observed, **shown, strength=strength)


def nanogpt_mfu(observed: Observed) -> list[Finding]:
    """nanoGPT divides by an A100's peak on every GPU."""
    claimed, spec, against = observed.median("mfu"), observed.spec, observed.trainer.entry.get("mfu_tflops")
    peak = _peak(observed)
    if not against or claimed is None or peak == against or (peak is None and claimed <= 0.6):
        return []
    shown = {"claimed": claimed, "against": against}
    if spec is None or peak is None:
        read = "say which GPU it was with --fact gpu=NAME; on an H100 or H200 divide it by 3.17 (989 / 312)"
        return found("nanogpt-mfu", observed, **shown, read=read, board="", peak=0.0, strength=0.7)
    shown |= {"right": (right := claimed * against / peak), "peak": peak}
    return found("nanogpt-mfu", observed, **shown, read=f"read it as {right:.1%}", board=spec.title)


RULES = (wrong_throughput, over_the_peak, mfu_by_arithmetic, nanogpt_mfu)
