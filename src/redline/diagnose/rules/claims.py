"""Pages of claims: what cannot hold, and what changes the work besides its speed. Arithmetic on what a document states; no
rule here promises speed.

FLOPs are counted as 6 per parameter and token (the attention term left out, which favours the claim), peaks are dense
datasheet peaks.
"""

import math
import re

from redline.diagnose.finding import Finding, Shown, found
from redline.diagnose.observed import Claim, Observed, Range, Setting
from redline.diagnose.trainers import named
from redline.errors import nearest
from redline.machine.specs import SPECS

INFERENCE_APIS = {
    "float8_dynamic_activation_float8_weight": "convert_to_float8_training",
    "Float8DynamicActivationFloat8WeightConfig": "convert_to_float8_training",
    "int8_weight_only": "nothing: int8 weights cannot be trained",
    "int4_weight_only": "nothing: int4 weights cannot be trained (QLoRA trains adapters beside them)",
}
"""Names of torchao that quantise a finished model, and what training has instead."""
WORK = {
    "max_prompt_length": "length of the prompts",
    "max_response_length": "length of the responses",
    "n": "responses a prompt",
    "oversample": "samples a question",
    "train_batch_size": "sequences an update",
    "tokens_per_step": "tokens an update",
    "seq_len": "sequence length",
    "block_size": "sequence length",
    "max_length": "sequence length",
}
"""Settings that say how much is to be computed, and so may not differ between a before and an after."""
GPT2 = {"small": 124e6, "medium": 355e6, "large": 774e6, "xl": 1558e6}
GPT2_VOCABULARY = 50_257
SUBJECTS = {
    "bf16 against fp32": r"\bb(?:rain )?float ?16|\bbf16",
    "FP8": r"\bfp8",
    "torch.compile": r"torch\.?compile",
}


def _change(observed: Observed, name: str) -> Claim | None:
    """The claim that gives this quantity before and after."""
    return next((c for c in observed.claims if c.name == name and c.before and c.after), None)


def _start(observed: Observed, name: str) -> Range | None:
    """The first value that the document starts from."""
    return next((c.before for c in observed.claims if c.name == name and c.before), None)


def speed_against_mfu(observed: Observed) -> list[Finding]:
    """On one model and one GPU tokens/s and MFU are the same number in two units: they must grow by the same factor."""
    speed, mfu = _change(observed, "tokens_per_s"), _change(observed, "mfu")
    if speed is None or mfu is None:
        return []
    faster, fuller = _growth(speed), _growth(mfu)
    if faster is None or fuller is None or (faster.low <= fuller.high and fuller.low <= faster.high):
        return []
    said = [
        f"{claim.before} to {claim.after}{unit}: times {by.low:.1f}–{by.high:.1f}"
        for claim, unit, by in ((speed, "", faster), (mfu, " %", fuller))
    ]
    shown = {"faster": faster.low, "fuller": fuller.high, "speed_line": speed.line, "mfu_line": mfu.line}
    return found("impossible-pair", observed, **shown, speed=said[0], mfu=said[1])


def _growth(claim: Claim) -> Range | None:
    if claim.before is None or claim.after is None or not claim.before.low:
        return None
    return Range(claim.after.low / claim.before.high, claim.after.high / claim.before.low)


def over_the_peak(observed: Observed) -> list[Finding]:
    """Tokens/s that need more FLOP/s than the GPUs have."""
    spec, facts = observed.spec, observed.facts
    if spec is None or observed.format != "document" or not (peak := spec.bf16_tflops or spec.fp16_tflops):
        return []
    gpus = facts.gpus or 1
    parameters = facts.parameters or _implied_parameters(observed, peak * gpus)
    speeds = [((c.after or c.before), c.line) for c in observed.claims if c.name == "tokens_per_s"]
    worst = max(((value.low, line) for value, line in speeds if value), default=None)
    if parameters is None or worst is None or (needed := 6 * parameters * worst[0] / 1e12) <= peak * gpus:
        return []
    shown: Shown = {"claimed": worst[0], "line": worst[1], "needed": needed / 1e3, "peak": peak * gpus / 1e3}
    shown |= {"gpus": gpus, "share": needed / (peak * gpus), "parameters": parameters, "board": spec.title}
    shown |= {"source": "stated" if facts.parameters else "implied by its own MFU and tokens/s"}
    shown |= {"fp8": needed / (spec.fp8_tflops * gpus) if spec.fp8_tflops else None}
    return found("over-peak", observed, **shown, strength=1.0 if facts.parameters else 0.85)


def _implied_parameters(observed: Observed, peak: float) -> float | None:
    """MFU x peak / (6 x tokens/s), from the state the document starts from."""
    mfu, speed = _start(observed, "mfu"), _start(observed, "tokens_per_s")
    if mfu is None or speed is None or not speed.low or observed.facts.mfu_scope != "the step":
        return None
    return math.sqrt(mfu.low * mfu.high) / 100 * peak * 1e12 / (6 * math.sqrt(speed.low * speed.high))


def per_gpu_throughput(observed: Observed) -> list[Finding]:
    """verl's perf/throughput read as the speed of the whole machine."""
    gpus, speed = observed.facts.gpus or 0, _start(observed, "tokens_per_s")
    if observed.format != "document" or "perf/throughput" not in observed.text or gpus < 2 or speed is None:
        return []
    return found("per-gpu-throughput", observed, speed=str(speed), every=str(speed.scaled(gpus)), gpus=gpus)


def gains_multiply(observed: Observed) -> list[Finding]:
    """Single gains whose product is not the total that is promised."""
    total = next((c for c in observed.claims if c.name == "total" and c.factor), None)
    single = [c for c in observed.claims if c.name == "speedup" and c.factor]
    if total is None or total.factor is None or len(single) < 2:
        return []
    low, high = (math.prod(getattr(c.factor, end) for c in single) for end in ("low", "high"))
    if low <= total.factor.high:
        return []
    listed = ", ".join(f"{c.factor}x (line {c.line})" for c in single)
    shown = {"low": low, "high": high, "total": str(total.factor), "listed": listed, "line": total.line}
    return found("gains-multiply", observed, **shown)


def unknown_arguments(observed: Observed) -> list[Finding]:
    """Arguments of TrainingArguments that do not exist: the call ends with a TypeError."""
    entry = named("huggingface").entry
    known, instead = {*entry["arguments"].split()}, entry["instead"]
    named_so = re.compile(r"[a-z][a-z0-9_]*")
    inside = [s for s in observed.settings if s.within == "TrainingArguments" and named_so.fullmatch(s.name)]
    unknown = {s.name: s for s in inside if s.name not in known | {"training_args", "args"}}
    if not unknown:
        return []
    told = "; ".join(f"{name}: {instead.get(name) or 'remove it' + nearest(name, known)}" for name in unknown)
    wrong = "line {}; not a field of transformers 5.17, a TypeError"
    rows = [(s.name, s.value, wrong.format(s.line)) for s in unknown.values()]
    return found("unknown-argument", observed, names=" and no ".join(unknown), instead=told, evidence=rows)


def inference_api(observed: Observed) -> list[Finding]:
    """A quantisation for finished models named as a way to train faster."""
    text, findings = observed.text if observed.format == "document" else "", []
    for name, instead in INFERENCE_APIS.items():
        if name in text:
            findings += found("inference-api", observed, name=name, instead=instead, times=text.count(name))
    return findings


def no_such_memory(observed: Observed) -> list[Finding]:
    """A memory size that the named GPU does not come with."""
    claim, spec = next((c for c in observed.claims if c.name == "memory_gb"), None), observed.spec
    if claim is None or claim.before is None or spec is None:
        return []
    family, stated = spec.name.split("-")[0], claim.before
    names = [name for name in SPECS if name.split("-")[0] == family]
    sizes = {int(name.rsplit("-", 1)[1].rstrip("g")) for name in names}
    if any(0.9 * size <= stated.high <= 1.02 * size for size in sizes):
        return []
    comes, span = " or ".join(str(size) for size in sorted(sizes)), f"{stated.low:g} of {stated.high:g}"
    shown = {
        "family": family.upper(),
        "stated": stated.high,
        "sizes": comes,
        "span": span,
        "line": claim.line,
    }
    return found("no-such-memory", observed, **shown)


def other_work(observed: Observed) -> list[Finding]:
    """Settings that define the work and differ between before and after."""
    pairs = {name: (observed.setting(name, "before"), observed.setting(name, "after")) for name in WORK}
    changed = [
        (name, f"{before.value} to {after.value}", f"{WORK[name]} (line {after.line})")
        for name, (before, after) in pairs.items()
        if before and after and before.value != after.value
    ]
    names = ", ".join(name for name, _, _ in changed)
    return found("other-work", observed, names=names, evidence=changed) if changed else []


def contradictions(observed: Observed) -> list[Finding]:
    """One document, one subject, two factors that cannot both be meant."""
    findings = []
    promised = [(c, c.factor) for c in observed.claims if c.name == "speedup" and c.factor]
    for subject, pattern in SUBJECTS.items():
        said = [(c, factor) for c, factor in promised if re.search(pattern, c.text, re.IGNORECASE)]
        if len(said) < 2 or max(f.low for _, f in said) <= 2 * min(f.high for _, f in said):
            continue
        rows = [(f"line {c.line}", str(factor), f"x: {c.text.strip('-* ')}") for c, factor in said]
        low, high = min(f.low for _, f in said), max(f.high for _, f in said)
        findings += found("contradiction", observed, subject=subject, low=low, high=high, evidence=rows)
    return findings


def accumulation_as_speed(observed: Observed) -> list[Finding]:
    """Accumulation listed among the speed-ups. N passes for one update are N times the work of one pass, no less."""
    counts = [s for s in observed.settings if s.name.split(".")[-1].startswith("gradient_accumulation")]
    many = [s for s in counts if re.fullmatch(r"[2-9]|\d\d{1,6}", s.value)]
    pattern = r"^#{1,6}[^\n]{0,200}gradient accumulation[^\n]{0,200}$"
    heading = re.search(pattern, observed.text, re.IGNORECASE | re.MULTILINE) if many else None
    if heading is None or observed.format != "document":
        return []
    passes, said = max(int(s.value) for s in many), heading[0].strip("# *")
    return found("accumulation-as-speed", observed, heading=said, passes=passes, line=many[-1].line)


def parameter_counts(observed: Observed) -> list[Finding]:
    """Sizes that a document states beside a command line, counted: 12 L d^2 in the blocks (feed-forward 4 d), V d in the
    embedding."""
    conventions, evidence = set(), []
    for claim in (c for c in observed.claims if c.name == "parameters" and c.before):
        width, depth = (_last(observed.settings, name, claim.line) for name in ("d_model", "num_layers"))
        if claim.before is None or not width or not depth:
            continue
        d, layers, stated = int(width.value), int(depth.value), claim.before.low
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
    return found("parameter-counts", observed, evidence=evidence) if conventions - {"with embedding"} else []


def _last(settings: tuple[Setting, ...], name: str, before_line: int) -> Setting | None:
    before = [s for s in settings if s.name == name and s.line < before_line and s.value.isdigit()]
    return before[-1] if before else None


def recomputation_among_changes(observed: Observed) -> list[Finding]:
    """A page that turns recomputation on, and says that memory was not short before. What it would take after the other
    changes is not known, so nothing is promised."""
    claims = [c for c in observed.claims if c.name == "memory_share"]
    share = next((c.before.high / 100 for c in claims if c.before), 1.0)
    if observed.format != "document" or observed.facts.recompute != "on" or share > 0.5:
        return []
    after = next((f"{c.after} %" for c in claims if c.after), "not stated")
    return found("needless-recomputation", observed, "page", share=share, after=after, how="on", strength=0.7)


RULES = (
    *(speed_against_mfu, over_the_peak, per_gpu_throughput, gains_multiply, unknown_arguments, inference_api),
    *(no_such_memory, other_work, contradictions, accumulation_as_speed, parameter_counts),
    recomputation_among_changes,
)
