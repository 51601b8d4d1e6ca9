"""Claims that cannot hold, and numbers that mean something else than they seem to: arithmetic on what a
document or a log states.

Each rule takes an Observed and gives findings; none of them promises speed. FLOPs are counted as 6 per
parameter and token (the attention term left out, which favours the claim), peaks are dense datasheet peaks.
"""

import math
import re

from redline.diagnose.consoles import NANOGPT_TFLOPS
from redline.diagnose.finding import Evidence, Finding
from redline.diagnose.observed import Claim, Observed, Range
from redline.diagnose.trainer_arguments import INSTEAD, KNOWN
from redline.errors import nearest
from redline.machine.specs import SPECS, GpuSpec

INFERENCE_APIS = {
    "float8_dynamic_activation_float8_weight": "convert_to_float8_training",
    "Float8DynamicActivationFloat8WeightConfig": "convert_to_float8_training",
    "int8_weight_only": "nothing: int8 weights cannot be trained",
    "int4_weight_only": "nothing: int4 weights cannot be trained (QLoRA trains adapters beside them)",
}
"""Names of torchao that quantise a finished model, and what training has instead."""


def spec_of(observed: Observed) -> GpuSpec | None:
    return SPECS.get(observed.facts.gpu or "")


def _finding(
    cause: str,
    title: str,
    evidence: list[tuple[str, float | str, str]],
    fix: str,
    confidence: float,
    *,
    unit: bool = False,
) -> Finding:
    shown = tuple(Evidence(*item) for item in evidence)
    return Finding(
        cause=cause,
        kind="unit" if unit else "claim",
        title=title,
        evidence=shown,
        fix=fix,
        gain=None,
        confidence=confidence,
    )


def _change(observed: Observed, name: str) -> Claim | None:
    """The claim that gives this quantity before and after."""
    return next((c for c in observed.claims if c.name == name and c.before and c.after), None)


def _start(observed: Observed, name: str) -> Range | None:
    """The first value that the document starts from."""
    return next((c.before for c in observed.claims if c.name == name and c.before), None)


def speed_against_mfu(observed: Observed) -> list[Finding]:
    """On one model and one GPU tokens/s and MFU are the same number in two units: they must grow by the same
    factor."""
    speed, mfu = _change(observed, "tokens_per_s"), _change(observed, "mfu")
    if not (speed and mfu and speed.before and speed.after and mfu.before and mfu.after):
        return []
    faster = Range(speed.after.low / speed.before.high, speed.after.high / speed.before.low)
    fuller = Range(mfu.after.low / mfu.before.high, mfu.after.high / mfu.before.low)
    if faster.low <= fuller.high and fuller.low <= faster.high:
        return []
    return [
        _finding(
            "impossible-pair",
            f"Tokens/s times {faster.low:.1f} and MFU times {fuller.high:.1f} cannot both hold",
            [
                (
                    "tokens/s",
                    f"{speed.before} to {speed.after}: times {faster.low:.1f}–{faster.high:.1f}",
                    f"line {speed.line}",
                ),
                (
                    "MFU",
                    f"{mfu.before} to {mfu.after} %: times {fuller.low:.1f}–{fuller.high:.1f}",
                    f"line {mfu.line}",
                ),
            ],
            "MFU = tokens/s x FLOPs per token / peak: with one model on one GPU both grow alike. Believe"
            " neither; measure both with `redline bench train`",
            0.97,
        )
    ]


def over_the_peak(observed: Observed) -> list[Finding]:
    """Tokens/s that need more FLOP/s than the GPUs have."""
    spec, found = spec_of(observed), []
    if spec is None or (peak := spec.bf16_tflops or spec.fp16_tflops) is None:
        return []
    parameters, source = observed.facts.parameters, "stated"
    if parameters is None:
        parameters, source = _implied_parameters(observed, peak), "implied by its own MFU and tokens/s"
    if parameters is None:
        return []
    if observed.facts.gpus is None and observed.median("mfu") is not None:
        # how many GPUs there were is not said, and the log's own MFU says that it was more than one:
        # mfu_by_arithmetic asks
        return []
    gpus = observed.facts.gpus or 1
    speeds = [(c.after or c.before, c.line) for c in observed.claims if c.name == "tokens_per_s"]
    speeds += [(Range(observed.tokens_per_s, observed.tokens_per_s), 0)] if observed.tokens_per_s else []
    worst = max(((value.low, line) for value, line in speeds if value), default=None)
    if worst is not None and (needs := 6 * parameters * worst[0] / 1e12) > peak * gpus:
        evidence: list[tuple[str, float | str, str]] = [
            ("claimed", worst[0], "tokens/s" + (f" (line {worst[1]})" if worst[1] else "")),
            ("parameters", parameters, source),
            ("needed", needs / 1e3, "PFLOP/s (6 x parameters x tokens/s)"),
            ("bf16 peak", peak * gpus / 1e3, f"PFLOP/s dense, {gpus:.0f} x {spec.title}"),
        ]
        if spec.fp8_tflops:
            evidence.append(
                (
                    "of the FP8 peak",
                    needs / (spec.fp8_tflops * gpus),
                    "share; nothing trains at more than about 0.5 of it",
                )
            )
        title = (
            f"{worst[0]:,.0f} tokens/s needs {needs / 1e3:.2f} PFLOP/s: {needs / (peak * gpus):.0%} of the"
            " GPU's bf16 peak"
        )
        fix = "no setting reaches it; 40 to 60 % of the bf16 peak is what good training reaches"
        if observed.facts.gpus is None and observed.format != "document":
            fix += "; if there was more than one GPU, say so with --fact gpus=N"
        found.append(_finding("over-peak", title, evidence, fix, 0.97 if source == "stated" else 0.85))
    return found


def _implied_parameters(observed: Observed, peak: float) -> float | None:
    """MFU x peak / (6 x tokens/s), from the state the document starts from."""
    mfu, speed = _start(observed, "mfu"), _start(observed, "tokens_per_s")
    if mfu is None or speed is None or observed.facts.mfu_scope != "the step":
        return None
    middle = math.sqrt(mfu.low * mfu.high) / 100
    return middle * peak * 1e12 * (observed.facts.gpus or 1) / (6 * math.sqrt(speed.low * speed.high))


def mfu_by_arithmetic(observed: Observed) -> list[Finding]:
    """An MFU that does not follow from the log's own tokens/s: another peak, or FLOPs counted more than
    once."""
    spec, facts = spec_of(observed), observed.facts
    claimed, speed = observed.median("mfu"), observed.tokens_per_s
    if claimed is None or speed is None or facts.parameters is None or facts.mfu_scope != "the step":
        return []
    peak = (spec.bf16_tflops or spec.fp16_tflops) if spec else facts.mfu_peak_tflops
    # our own MFU is counted against the peak of its precision
    if peak is None or observed.format in ("nanogpt", "run"):
        return []
    per_token = facts.flops_per_token or 6 * facts.parameters
    right = per_token * speed / (peak * 1e12 * (facts.gpus or 1))
    ratio = claimed / right
    if 0.85 <= ratio <= 1.2 or claimed > 1:  # more than the peak is impossible_mfu's
        return []
    if right > 1:  # with the GPUs known, over_the_peak says so
        return _on_several(observed, speed, right, claimed) if facts.gpus is None else []
    thrice = 2.6 <= ratio <= 3.4
    why = (
        "three times too high: 6N already counts forward (2N) and backward (4N), and somebody multiplied it"
        " by 3 again"
        if thrice
        else f"{ratio:.2f} times what its own tokens/s give"
    )
    return [
        _finding(
            "mfu-6n-thrice" if thrice else "mfu-mismatch",
            f"The log's MFU of {claimed:.1%} is {why}",
            [
                ("tokens/s", speed, "tokens/s, all GPUs"),
                ("FLOPs per token", per_token / 1e9, "GFLOP"),
                ("peak", peak * (facts.gpus or 1), "TFLOP/s dense bf16"),
                ("MFU", right, "share, by this arithmetic"),
            ],
            f"read it as {right:.1%}",
            0.9 if thrice else 0.7,
            unit=True,
        )
    ]


def _on_several(observed: Observed, speed: float, right: float, claimed: float) -> list[Finding]:
    """Tokens/s that one GPU cannot do, beside an MFU that it could: the log does not say how many there
    were."""
    return [
        _finding(
            "mfu-mismatch",
            f"{speed:,.0f} tokens/s are {right:.0%} of one GPU's peak, which is impossible, beside an MFU of"
            f" {claimed:.0%}",
            [
                ("tokens/s", speed, "tokens/s"),
                ("of one GPU's bf16 peak", right, "share"),
                ("MFU of the log", claimed, "share"),
            ],
            "say how many GPUs there were with --fact gpus=N; if it was one, believe neither number",
            0.9,
        )
    ]


def impossible_mfu(observed: Observed) -> list[Finding]:
    """An MFU above one, whatever it is counted against. nanoGPT's is nanogpt_mfu's as long as the GPU is not
    known."""
    claimed, spec = observed.median("mfu"), spec_of(observed)
    if claimed is not None and observed.format == "nanogpt":
        peak = (spec.bf16_tflops or spec.fp16_tflops) if spec else None
        claimed = claimed * NANOGPT_TFLOPS / peak if peak else None
    if claimed is None or claimed <= 1:
        return []
    return [
        _finding(
            "over-peak",
            f"An MFU of {claimed:.0%} is more than the GPU can do",
            [
                ("MFU", claimed, "of the peak, median"),
                ("possible", "40 to 60 %", "is what good training reaches"),
            ],
            "FLOPs or tokens are counted more than once, or against too low a peak; if the column is in per"
            " cent, say so with --map mfu=COLUMN:%",
            0.95,
        )
    ]


def nanogpt_mfu(observed: Observed) -> list[Finding]:
    """nanoGPT divides by an A100's peak on every GPU."""
    claimed, spec = observed.median("mfu"), spec_of(observed)
    if observed.format != "nanogpt" or claimed is None:
        return []
    title = (
        f"nanoGPT's MFU of {claimed:.1%} is counted against an A100's {NANOGPT_TFLOPS:.0f} TFLOP/s, whatever"
        " the GPU is"
    )
    evidence: list[tuple[str, float | str, str]] = [("MFU as printed", claimed, "share of 312 TFLOP/s")]
    if spec is None:
        fix = "say which GPU it was with --fact gpu=NAME; on an H100 or H200 divide it by 3.17 (989 / 312)"
        return [_finding("nanogpt-mfu", title, evidence, fix, 0.6, unit=True)]
    peak = spec.bf16_tflops or spec.fp16_tflops
    if peak == NANOGPT_TFLOPS:
        return []
    right = claimed * NANOGPT_TFLOPS / peak
    evidence.append((f"MFU on {spec.title}", right, f"share of {peak:.0f} TFLOP/s"))
    return [_finding("nanogpt-mfu", title, evidence, f"read it as {right:.1%}", 0.97, unit=True)]


def per_gpu_throughput(observed: Observed) -> list[Finding]:
    """verl's perf/throughput read as the speed of the whole machine."""
    gpus, speed = observed.facts.gpus, _start(observed, "tokens_per_s")
    if (
        observed.format != "document"
        or "perf/throughput" not in observed.text
        or not gpus
        or gpus < 2
        or speed is None
    ):
        return []
    return [
        _finding(
            "per-gpu-throughput",
            f"perf/throughput is tokens/s of one GPU: {speed} means {speed.scaled(gpus)} on {gpus:.0f} GPUs",
            [
                (
                    "perf/throughput",
                    str(speed),
                    "tokens/s of one GPU, over the whole step, prompts and generation included",
                ),
                ("all GPUs", str(speed.scaled(gpus)), "tokens/s"),
            ],
            "compare per GPU with per GPU; a target for the machine must be divided by the number of GPUs",
            0.9,
            unit=True,
        )
    ]


def gains_multiply(observed: Observed) -> list[Finding]:
    """Single gains whose product is not the total that is promised."""
    total = next((c for c in observed.claims if c.name == "total" and c.factor), None)
    single = [c for c in observed.claims if c.name == "speedup" and c.factor]
    if total is None or total.factor is None or len(single) < 2:
        return []
    product = Range(*(math.prod(getattr(c.factor, end) for c in single) for end in ("low", "high")))
    if product.low <= total.factor.high:
        return []
    listed = ", ".join(f"{c.factor}x (line {c.line})" for c in single)
    return [
        _finding(
            "gains-multiply",
            f"The gains multiply to {product.low:.1f}–{product.high:.1f}x, the promised total is"
            f" {total.factor}x",
            [("single gains", listed, ""), ("total", str(total.factor), f"x (line {total.line})")],
            "gains overlap (TF32 after bf16 brings nothing, loader workers bring nothing to a run that does"
            " not wait): measure them one by one, and each taken away from the best",
            0.95,
        )
    ]


def unknown_arguments(observed: Observed) -> list[Finding]:
    """Arguments of TrainingArguments that do not exist: the call ends with a TypeError."""
    written = {
        s.name: s
        for s in observed.settings
        if s.within == "TrainingArguments" and re.fullmatch(r"[a-z][a-z0-9_]*", s.name)
    }
    unknown = [
        s for name, s in written.items() if name not in KNOWN and name not in ("training_args", "args")
    ]
    if not unknown:
        return []
    hints = "; ".join(
        f"{s.name}: {INSTEAD.get(s.name) or 'remove it' + nearest(s.name, KNOWN)}" for s in unknown
    )
    return [
        _finding(
            "unknown-argument",
            f"TrainingArguments has no {' and no '.join(s.name for s in unknown)}",
            [
                (s.name, s.value, f"line {s.line}; not a field of transformers 5.17, a TypeError")
                for s in unknown
            ],
            hints,
            0.95,
        )
    ]


def inference_api(observed: Observed) -> list[Finding]:
    """A quantisation for finished models named as a way to train faster."""
    return [
        _finding(
            "inference-api",
            f"{name} quantises a finished model; it does not train in FP8",
            [("named", name, f"{len(re.findall(name, observed.text))} time(s)")],
            f"torchao.float8: {instead}, compiled, matrix sides multiples of 16; here `--set"
            " plan.precision=fp8`. It pays for wide matrices only: at 124M parameters on an H200 it measured"
            " slower than bf16, at 1.3B 1.21 times as fast",
            0.95,
        )
        for name, instead in INFERENCE_APIS.items()
        if name in observed.text
    ]


def no_such_memory(observed: Observed) -> list[Finding]:
    """A memory size that the named GPU does not come with."""
    claim, spec = (
        next((c for c in observed.claims if c.name == "memory_gb" and c.before), None),
        spec_of(observed),
    )
    if claim is None or claim.before is None or spec is None:
        return []
    family = spec.name.split("-")[0]
    sizes = sorted(
        {int(s.name.rsplit("-", 1)[1].rstrip("g")) for s in SPECS.values() if s.name.startswith(family)}
    )
    if any(0.9 * size <= claim.before.high <= 1.02 * size for size in sizes):
        return []
    have = " or ".join(str(size) for size in sizes)
    return [
        _finding(
            "no-such-memory",
            f"No {family.upper()} has {claim.before.high:g} GB: it comes with {have} GB",
            [("stated", f"{claim.before.low:g} of {claim.before.high:g}", f"GB (line {claim.line})")],
            "read the total with `nvidia-smi` or `redline machine`; the utilisation computed from it is"
            " wrong",
            0.9,
        )
    ]


RULES = (
    speed_against_mfu,
    over_the_peak,
    mfu_by_arithmetic,
    impossible_mfu,
    nanogpt_mfu,
    per_gpu_throughput,
    gains_multiply,
    unknown_arguments,
    inference_api,
    no_such_memory,
)
