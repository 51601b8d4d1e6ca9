"""What a document changes besides speed: other work sold as faster work, accumulation sold as speed, sizes
that are not what they say."""

import re

from redline.diagnose.finding import Evidence, Finding
from redline.diagnose.observed import Observed, Setting

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


def _claim(cause: str, title: str, evidence: list[Evidence], fix: str, confidence: float) -> Finding:
    return Finding(
        cause=cause,
        kind="claim",
        title=title,
        evidence=tuple(evidence),
        fix=fix,
        gain=None,
        confidence=confidence,
    )


def other_work(observed: Observed) -> list[Finding]:
    """Settings that define the work and differ between before and after."""
    changed = []
    for name, meaning in WORK.items():
        before, after = observed.setting(name, "before"), observed.setting(name, "after")
        if before and after and before.value != after.value:
            changed.append(
                Evidence(name, f"{before.value} to {after.value}", f"{meaning} (line {after.line})")
            )
    if not changed:
        return []
    return [
        _claim(
            "other-work",
            f"Before and after do different work: {', '.join(item.name for item in changed)} changed",
            changed,
            "compare speeds only under one fingerprint: same data, lengths, batch and model; a larger batch"
            " or longer text is another training, and says nothing about speed",
            0.9,
        )
    ]


def contradictions(observed: Observed) -> list[Finding]:
    """One document, one subject, two factors that cannot both be meant."""
    found = []
    for subject, pattern in SUBJECTS.items():
        said = [
            c
            for c in observed.claims
            if c.name == "speedup" and c.factor and re.search(pattern, c.text, re.IGNORECASE)
        ]
        factors = [c.factor for c in said if c.factor]
        if len(factors) < 2 or max(f.low for f in factors) <= 2 * min(f.high for f in factors):
            continue
        title = (
            f"{subject}: {max(f.high for f in factors):g}x in one line and {min(f.low for f in factors):g}x"
            " in another"
        )
        evidence = [Evidence(f"line {c.line}", str(c.factor), f"x: {c.text.strip('-* ')}") for c in said]
        fix = (
            "16 is the ratio of the peaks of an A100's bf16 and fp32 units; a step is never only matrix"
            " products. Measure it"
        )
        found.append(_claim("contradiction", title, evidence, fix, 0.85))
    return found


def accumulation_as_speed(observed: Observed) -> list[Finding]:
    """Accumulation listed among the speed-ups. N passes for one update are N times the work of one pass, no
    less."""
    many = [
        s
        for s in observed.settings
        if s.name.split(".")[-1].startswith("gradient_accumulation") and re.fullmatch(r"[2-9]|\d\d+", s.value)
    ]
    heading = re.search(r"^#+.*gradient accumulation.*$", observed.text, re.IGNORECASE | re.MULTILINE)
    if not many or heading is None:
        return []
    last = many[-1]
    return [
        _claim(
            "accumulation-as-speed",
            "Gradient accumulation is sold as an optimisation; it makes nothing faster",
            [
                Evidence("heading", heading[0].strip("# *"), "among the optimisations"),
                Evidence(
                    "accumulation", max(int(s.value) for s in many), f"passes an update (line {last.line})"
                ),
            ],
            "tokens/s stay the same at best; N passes take N times as long. It saves memory, and a larger"
            " batch is another training. For speed take the largest pass that fits and accumulation 1"
            " (`redline plan` chooses it)",
            0.9,
        )
    ]


def parameter_counts(observed: Observed) -> list[Finding]:
    """Sizes that a document states beside a command line, counted: 12 L d^2 in the blocks (feed-forward 4 d),
    V d in the embedding."""
    wrong, evidence = [], []
    for claim in (c for c in observed.claims if c.name == "parameters" and c.before):
        shape = {name: _last(observed.settings, name, claim.line) for name in ("d_model", "num_layers")}
        if claim.before is None or not shape["d_model"] or not shape["num_layers"]:
            continue
        d, layers, stated = int(shape["d_model"].value), int(shape["num_layers"].value), claim.before.low
        blocks, embedding = 12 * layers * d * d, GPT2_VOCABULARY * d
        near = min(
            (blocks, "blocks alone"),
            (blocks + embedding, "with embedding"),
            key=lambda pair: abs(pair[0] - stated),
        )
        fits = near[1] if abs(near[0] - stated) <= 0.04 * stated else "neither"
        counted = f"{blocks / 1e6:.0f}M in the blocks, {(blocks + embedding) / 1e6:.0f}M with the embedding"
        scale = re.search(r"GPT-2 (\w+) scale", claim.text)
        note = ""
        if scale and (real := GPT2.get(scale[1].lower())) and not 0.9 < stated / real < 1.1:
            note = f"; GPT-2 {scale[1]} has {real / 1e6:.0f}M"
        evidence.append(
            Evidence(
                f"{stated / 1e6:.0f}M stated",
                counted,
                f"for {layers} layers of {d} (line {claim.line}): {fits}{note}",
            )
        )
        wrong.append((fits, bool(note)))
    conventions = {fits for fits, _ in wrong}
    if not wrong or (conventions == {"with embedding"} and not any(named for _, named in wrong)):
        return []
    return [
        _claim(
            "parameter-counts",
            "The parameter counts follow no one convention, or none",
            evidence,
            "counted with a feed-forward width of 4 d and GPT-2's 50,257 tokens; the counts change with"
            " --d_ff. `redline plan RECIPE` prints the exact number",
            0.9,
        )
    ]


def _last(settings: tuple[Setting, ...], name: str, before_line: int) -> Setting | None:
    found = [s for s in settings if s.name == name and s.line < before_line and s.value.isdigit()]
    return found[-1] if found else None


RULES = (other_work, contradictions, accumulation_as_speed, parameter_counts)
