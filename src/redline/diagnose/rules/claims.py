"""Pages of claims: what cannot hold, and what changes the work besides its speed. Arithmetic on what a document states; no
rule here promises speed.

FLOPs are counted as 6 per parameter and token (the attention term left out, which favours the claim), peaks are dense
datasheet peaks.
"""

import math
import re
from collections.abc import Iterator

from redline.diagnose.finding import Finding, causes, found
from redline.diagnose.observed import Claim, Observed, Range
from redline.diagnose.trainers import named
from redline.errors import nearest
from redline.machine.specs import SPECS

GPT2 = {"small": 124e6, "medium": 355e6, "large": 774e6, "xl": 1558e6}
GPT2_VOCABULARY = 50_257


def speed_against_mfu(observed: Observed) -> list[Finding]:
    """On one model and one GPU tokens/s and MFU are the same number in two units: they must grow by the same factor."""
    pairs = {c.name: c for c in reversed(observed.claims) if c.before and c.after}
    speed, mfu = pairs.get("tokens_per_s"), pairs.get("mfu")
    faster, fuller = _growth(speed), _growth(mfu)
    if not faster or not fuller or (faster.low <= fuller.high and fuller.low <= faster.high):
        return []
    return found("impossible-pair", locals())


def _growth(claim: Claim | None) -> Range | None:
    if claim is None or claim.before is None or claim.after is None or not claim.before.low:
        return None
    return Range(claim.after.low / claim.before.high, claim.after.high / claim.before.low)


def over_the_peak(observed: Observed) -> list[Finding]:
    """Tokens/s that need more FLOP/s than the GPUs have."""
    spec, facts, peak = observed.spec, observed.facts, observed.peak_tflops
    if spec is None or not peak:
        return []
    gpus, mfu, start = facts.gpus or 1, observed.start("mfu"), observed.start("tokens_per_s")
    parameters = facts.parameters
    if not parameters and mfu and start and start.low and facts.mfu_scope == "the step":
        parameters = mfu.middle / 100 * peak * gpus * 1e12 / (6 * start.middle)
    speeds = [((c.after or c.before), c.line) for c in observed.claims if c.name == "tokens_per_s"]
    claimed, line = max(((value.low, line) for value, line in speeds if value), default=(0.0, 0))
    needed, peak = 6 * (parameters or 0.0) * claimed / 1e15, peak * gpus / 1e3
    share, fp8 = needed / peak, needed * 1e3 / (spec.fp8_tflops * gpus) if spec.fp8_tflops else None
    source = "stated" if facts.parameters else "implied by its own MFU and tokens/s"
    return found("over-peak", locals(), strength=1.0 if facts.parameters else 0.85) if share > 1 else []


def per_gpu_throughput(observed: Observed) -> list[Finding]:
    """verl's perf/throughput read as the speed of the whole machine."""
    gpus, speed = observed.facts.gpus or 0, observed.start("tokens_per_s")
    if "perf/throughput" not in observed.text or gpus < 2 or speed is None:
        return []
    every = str(Range(gpus * speed.low, gpus * speed.high))
    return found("per-gpu-throughput", locals() | {"speed": str(speed)})


def gains_multiply(observed: Observed) -> list[Finding]:
    """Single gains whose product is not the total that is promised."""
    total = next((c for c in observed.claims if c.name == "total" and c.factor), None)
    single = [c for c in observed.claims if c.name == "speedup" and c.factor]
    if total is None or total.factor is None or len(single) < 2:
        return []
    low, high = (math.prod(getattr(c.factor, end) for c in single) for end in ("low", "high"))
    listed, promised = ", ".join(f"{c.factor}x (line {c.line})" for c in single), str(total.factor)
    return found("gains-multiply", locals()) if low > total.factor.high else []


def unknown_arguments(observed: Observed) -> list[Finding]:
    """Arguments of TrainingArguments that do not exist: the call ends with a TypeError."""
    entry = named("huggingface").entry
    known, better = {*entry["arguments"].split()}, entry["instead"]
    named_so = re.compile(r"[a-z][a-z0-9_]*")
    inside = [s for s in observed.settings if s.within == "TrainingArguments" and named_so.fullmatch(s.name)]
    unknown = {s.name: s for s in inside if s.name not in known | {"training_args", "args"}}
    names, wrong = " and no ".join(unknown), "not a field of transformers 5.17, a TypeError"
    mended = {name: better.get(name) or "remove it" + nearest(name, known) for name in unknown}
    instead = "; ".join(f"{name}: {instead}" for name, instead in mended.items())
    evidence = [(s.name, s.value, f"line {s.line}; {wrong}") for s in unknown.values()]
    return found("unknown-argument", locals()) if unknown else []


def inference_api(observed: Observed) -> Iterator[Finding]:
    """A quantisation for finished models named as a way to train faster."""
    for name, instead in causes()["inference-api"]["instead"].items():
        if times := observed.text.count(name):
            yield from found("inference-api", locals() | {"instead": instead})


def no_such_memory(observed: Observed) -> list[Finding]:
    """A memory size that the named GPU does not come with."""
    claim, spec = next((c for c in observed.claims if c.name == "memory_gb"), None), observed.spec
    if claim is None or claim.before is None or spec is None:
        return []
    family, stated = spec.name.split("-")[0].upper(), claim.before
    boards = [name.split("-") for name in SPECS]
    sizes = sorted({int(parts[-1].rstrip("g")) for parts in boards if parts[0].upper() == family})
    comes, span = " or ".join(map(str, sizes)), f"{stated.low:g} of {stated.high:g}"
    fits = any(0.9 * size <= stated.high <= 1.02 * size for size in sizes)
    return [] if fits else found("no-such-memory", locals())


def other_work(observed: Observed) -> list[Finding]:
    """Settings that define the work and differ between before and after."""
    work = causes()["other-work"]["settings"]
    pairs = {name: (observed.setting(name, "before"), observed.setting(name, "after")) for name in work}
    evidence = [
        (name, f"{before.value} to {after.value}", f"{work[name]} (line {after.line})")
        for name, (before, after) in pairs.items()
        if before and after and before.value != after.value
    ]
    names = ", ".join(name for name, _, _ in evidence)
    return found("other-work", locals()) if evidence else []


def contradictions(observed: Observed) -> Iterator[Finding]:
    """One document, one subject, two factors that cannot both be meant."""
    promised = [(c, c.factor) for c in observed.claims if c.name == "speedup" and c.factor]
    for subject, pattern in causes()["contradiction"]["subjects"].items():
        said = [(c, factor) for c, factor in promised if re.search(pattern, c.text, re.IGNORECASE)]
        if len(said) < 2 or max(f.low for _, f in said) <= 2 * min(f.high for _, f in said):
            continue
        evidence = [(f"line {c.line}", str(factor), f"x: {c.text.strip('-* ')}") for c, factor in said]
        low, high = min(f.low for _, f in said), max(f.high for _, f in said)
        yield from found("contradiction", locals() | {"subject": subject})


def accumulation_as_speed(observed: Observed) -> list[Finding]:
    """Accumulation listed among the speed-ups. N passes for one update are N times the work of one pass, no less."""
    counts = [s for s in observed.settings if s.name.split(".")[-1].startswith("gradient_accumulation")]
    many = [s for s in counts if re.fullmatch(r"[2-9]|\d\d{1,6}", s.value)]
    pattern = r"^#{1,6}[^\n]{0,200}gradient accumulation[^\n]{0,200}$"
    if not many or not (hit := re.search(pattern, observed.text, re.IGNORECASE | re.MULTILINE)):
        return []
    passes, heading, line = max(int(s.value) for s in many), hit[0].strip("# *"), many[-1].line
    return found("accumulation-as-speed", locals())


def parameter_counts(observed: Observed) -> list[Finding]:
    """Stated model sizes, counted again: 12 L d^2 parameters in the blocks, V d in the embedding."""
    conventions, evidence = set(), []
    for claim in (c for c in observed.claims if c.name == "parameters" and c.before):
        above = [s for s in observed.settings if s.line < claim.line and s.value.isdecimal()]
        shape = {s.name: int(s.value) for s in above if s.name in ("d_model", "num_layers")}
        if claim.before is None or len(shape) < 2:
            continue
        d, layers, stated = shape["d_model"], shape["num_layers"], claim.before.low
        blocks, embedding = 12 * layers * d * d, GPT2_VOCABULARY * d
        counts = ((blocks, "blocks alone"), (blocks + embedding, "with embedding"))
        near = min(counts, key=lambda pair: abs(pair[0] - stated))
        fits = near[1] if abs(near[0] - stated) <= 0.04 * stated else "neither"
        scale = re.search(r"GPT-2 (\w{1,20}) scale", claim.text)
        real = GPT2.get(scale[1].lower(), stated) if scale else stated
        note = f"; GPT-2 {scale[1]} has {real / 1e6:.0f}M" if scale and not 0.9 < stated / real < 1.1 else ""
        counted = f"{blocks / 1e6:.0f}M in the blocks, {(blocks + embedding) / 1e6:.0f}M with the embedding"
        where = f"for {layers} layers of {d} (line {claim.line}): {fits}{note}"
        evidence.append((f"{stated / 1e6:.0f}M stated", counted, where))
        conventions.add(note or fits)
    return found("parameter-counts", locals()) if conventions - {"with embedding"} else []


def recomputation_among_changes(observed: Observed) -> list[Finding]:
    """A page that turns recomputation on, and says that memory was not short before. What it would take after the other
    changes is not known, so nothing is promised."""
    claims = [c for c in observed.claims if c.name == "memory_share"]
    share = next((c.before.high / 100 for c in claims if c.before), 1.0)
    after = next((f"{c.after}%" for c in claims if c.after), "not stated")
    short = observed.facts.recompute != "on" or share > 0.5
    return [] if short else found("needless-recomputation", locals(), "page", strength=0.7)
