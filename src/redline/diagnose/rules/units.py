"""Numbers of a log that mean something else than they seem to: tokens/s of whom, an MFU against which peak. Arithmetic;
none of these makes anything faster.

FLOPs are counted as 6 per parameter and token where the log does not print them, peaks are dense datasheet peaks. Nothing
is said where the number of GPUs is a guess.
"""

from redline.diagnose.finding import Finding, found
from redline.diagnose.observed import Observed

ALIKE = (0.8, 1.25)
"""Two ways to count FLOPs differ by as much."""


def wrong_throughput(observed: Observed) -> list[Finding]:
    """Printed tokens/s that step time and batch contradict."""
    printed, speed, accumulation = (
        observed.printed_tokens_per_s,
        observed.tokens_per_s,
        observed.facts.accumulation,
    )
    if not printed or not speed or not observed.enough:
        return []
    times = speed / printed
    one_pass = round(times) == accumulation
    whose = "one pass of an update over the time of all" if one_pass else "not those of step time and batch"
    return found("wrong-throughput", locals())


def over_the_peak(observed: Observed) -> list[Finding]:
    """Tokens/s that need more FLOP/s than the GPUs have, or an MFU above one."""
    facts, peak, claimed, mfu = (
        observed.facts,
        observed.peak_tflops,
        observed.tokens_per_s,
        observed.median("mfu"),
    )
    if mfu is not None and observed.trainer.entry.get("mfu_tflops"):  # nanogpt_mfu's until the GPU is known
        mfu = mfu * (facts.mfu_peak_tflops or 0.0) / peak if peak else None
    if mfu is not None and mfu > 1:
        return found("over-peak", locals(), "mfu")
    if not peak or not facts.parameters or not claimed or not facts.gpus:
        return []
    needed, peak = 6 * facts.parameters * claimed / 1e15, peak * facts.gpus / 1e3
    share = needed / peak
    return found("over-peak", locals(), "log", strength=0.9) if share > 1 else []


def mfu_by_arithmetic(observed: Observed) -> list[Finding]:
    """An MFU that does not follow from the log's own tokens/s: another peak, or FLOPs counted more than once."""
    facts, claimed, speed = observed.facts, observed.median("mfu"), observed.tokens_per_s
    peak = observed.peak_tflops or facts.mfu_peak_tflops
    per_token = facts.flops_per_token or 6 * (facts.parameters or 0.0)
    judged = facts.mfu_scope == "the step" and not observed.trainer.entry.get("mfu_tflops")
    if not judged or not claimed or claimed > 1 or not speed or not peak or not per_token:
        return []
    right, gflop = per_token * speed / (peak * 1e12 * (facts.gpus or 1)), per_token / 1e9
    if facts.gpus is None:  # tokens/s that one GPU cannot do, beside an MFU that it could
        return found("mfu-mismatch", locals(), "several", strength=0.6) if right > 1 else []
    ratio, peak = claimed / right, peak * facts.gpus
    if ALIKE[0] <= ratio <= ALIKE[1] or right > 1:
        return []
    thrice = 2.6 <= ratio <= 3.4
    return found("mfu-6n-thrice" if thrice else "mfu-mismatch", locals(), strength=1.0 if thrice else 0.6)


def nanogpt_mfu(observed: Observed) -> list[Finding]:
    """nanoGPT divides by an A100's peak on every GPU."""
    claimed, spec, against = observed.median("mfu"), observed.spec, observed.trainer.entry.get("mfu_tflops")
    peak = observed.peak_tflops
    if not against or claimed is None or peak == against or (not peak and claimed <= 0.6):
        return []
    right = claimed * against / peak if peak else None
    return found("nanogpt-mfu", locals(), "" if spec else "unknown", strength=1.0 if spec else 0.7)
