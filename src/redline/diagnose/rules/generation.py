"""Generation inside training: far below what cached decoding gives, mostly something else than generating, held up by its
longest answer, in batches smaller than they seem, or of samples that are almost never correct.

With a cache of keys and values one decoding step reads every weight once, whatever the number of sequences: 2 bytes x
parameters / bandwidth is its floor. Without one it computes the whole prefix again for every token. A watched loop shows
which (observe/generation.py).
"""

import math
import re
from typing import NamedTuple

from redline.diagnose.finding import WORTH_SAYING, Finding, found
from redline.diagnose.observed import Observed

ASSUMED_PARAMETERS = 1.5e9
"""Where a document does not state the model's size; the finding says so."""
DECODE_SHARE = 0.5
"""Share of the bandwidth that a good engine's decoding step reaches, attention and sampling included."""
ANY_BANDWIDTH = 900e9
"""Bytes/s of a V100: where the GPU is not named, the slowest that trains."""
SLOW_STEP_S = 0.05
"""A decoding step of a cached engine takes 5 to 30 ms on one GPU at up to 256 sequences; longer has another cause."""
CACHED_CALL = {"cpu": (0.75, 1.5), "cuda": (1.0, 1.6)}
"""Cost of a cached call relative to what the uncached calls predict: small products are slower, and the cache is read and
extended. On a GPU that comes on top, two kernels per layer; on a CPU it is little compared with the products."""
ENGINES = ("vllm", "sglang", "trtllm")
"""Rollouts that always keep keys and values."""
LONG_TAIL = 4.0
"""From this many times the mean on, most rows of a generation have ended long before its longest one."""
GENERATED_TOGETHER = {10: 331.0, 240: 9_600.0, 1920: 24_900.0}
"""Tokens/s of transformers' `generate` by sequences in a call (H200, 360M parameters, measured for this project)."""
GRAPHS = (1.05, 1.5)
"""What CUDA graphs bring to the decoding of small batches."""
AGENTS, SLOWEST = "agent loop generate sequences", "agent loop slowest generate sequences"
INSIDE = ("generate sequences", "generation timing max", SLOWEST, f"{AGENTS} max")
"""What verl calls the engine's own time inside `gen`."""


def decode_floor_s(observed: Observed, bandwidth: float = 0.0, parameters: float = 0.0) -> float | None:
    """Time of one cached decoding step in half precision that a good engine reaches, where model and GPU are known."""
    bandwidth = observed.spec.memory_bandwidth_bytes_per_s if observed.spec else bandwidth
    parameters = observed.facts.parameters or parameters
    return 2 * parameters / (DECODE_SHARE * bandwidth) if bandwidth and parameters else None


class _Phase(NamedTuple):
    """Generation in a log that names it."""

    gen_s: float
    share: float
    inside_s: float | None
    """The part that the engine spends generating, if the log shows it."""


def _phase(observed: Observed, least: float = 0.2) -> _Phase | None:
    """None where generation takes less than `least` of the step."""
    gen_s, step_s = observed.part("gen") or observed.median("generate_s"), observed.median("step_s")
    if not gen_s or not step_s or not observed.enough or gen_s / step_s < least:
        return None
    inside_s = next((s for name in INSIDE if (s := observed.part(name)) is not None), None)
    return _Phase(gen_s, min(1.0, gen_s / step_s), inside_s)


def nested(observed: Observed) -> list[Finding]:
    """A generation phase that mostly copies weights into the engine, wakes it and puts it to sleep."""
    phase = _phase(observed)
    if phase is None or phase.inside_s is None or phase.inside_s > 0.5 * phase.gen_s:
        return []
    rest_s, batch = phase.gen_s - phase.inside_s, observed.facts.batch_size
    rest = rest_s / phase.gen_s
    saves = 0.5 * phase.share * rest, phase.share * rest
    return found("nested-phases", locals())


def uncached(observed: Observed) -> list[Finding]:
    """A log that says how long generation took and how long the responses were: it ends with the longest."""
    facts, phase = observed.facts, _phase(observed, 0.3)
    length = facts.longest_response or facts.response_length
    told = facts.use_cache == "false" or facts.rollout == "hf"
    if phase is None or not length or facts.rollout in ENGINES or (phase.inside_s is not None and not told):
        return []
    token_s, floor_s = phase.gen_s / length, decode_floor_s(observed)
    row = (facts.prompt_length or 0.0) + (facts.response_length or 0.0)
    rows = (observed.median("tokens") or 0.0) / row / (facts.gpus or math.inf) if row else 0.0
    if not told and (token_s < (max(3 * floor_s, 0.02) if floor_s else SLOW_STEP_S) or rows > 256):
        return []
    reach_s = floor_s or SLOW_STEP_S / 2
    reached = "ms, weights read once at half the bandwidth" if floor_s else "ms, what engines reach"
    share = phase.share * (1 - min(1.0, reach_s / token_s))
    return found("uncached-generation", locals(), strength=1.0 if told else 0.65)


def slow(observed: Observed) -> list[Finding]:
    """Generation that takes most of the step and far longer than reading the weights once a token would, on any GPU."""
    facts, phase = observed.facts, _phase(observed, 0.5)
    length, floor_s = facts.longest_response or facts.response_length, decode_floor_s(observed, ANY_BANDWIDTH)
    if phase is None or phase.inside_s is not None or not length or not floor_s or uncached(observed):
        return []
    token_s, floor_s = phase.gen_s / length, floor_s / (facts.gpus or 1)
    of = "" if observed.spec else " of a V100"
    saves = 0.4 * phase.share, phase.share * (1 - floor_s / token_s)
    return found("slow-generation", locals(), strength=0.8) if token_s >= 3 * floor_s else []


def long_tail(observed: Observed) -> list[Finding]:
    """Generation that ends with a few long responses, while the other rows have ended."""
    facts, phase = observed.facts, _phase(observed, 0.3)
    timed = [observed.part(f"{AGENTS} {which}") for which in ("max", "mean")]
    longest, mean = timed if all(timed) else (facts.longest_response, facts.response_length)
    if phase is None or facts.rollout == "hf" or not longest or not mean or longest < LONG_TAIL * mean:
        return []
    times, unit = longest / mean, "s" if all(timed) else "tokens"
    saves = 0.0, phase.share * (1 - mean / longest)
    return found("long-tail", locals(), strength=0.8 if all(timed) else 0.5)


def eager(observed: Observed) -> list[Finding]:
    """An engine that launches every kernel of a decoding step by hand."""
    phase = _phase(observed)
    if observed.facts.eager_rollout != "true" or phase is None:
        return []
    saves = [phase.share * (1 - 1 / factor) for factor in GRAPHS]
    idle = phase.inside_s is not None and phase.inside_s < 0.5 * phase.gen_s
    return [] if idle else found("eager-generation", locals(), strength=0.8)


def uncached_loop(observed: Observed) -> list[Finding]:
    """A watched loop in which the model was seen to compute the prefix again for every token."""
    last, share = observed.last_event("generation"), observed.share("generate_s")
    if "repeated_s" not in last or not observed.mean("step_s") or not share:
        return []
    cached_s = max(decode_floor_s(observed) or 0.0, last["cached_call_s"])
    factors = reversed(CACHED_CALL["cuda" if observed.facts.gpu else "cpu"])
    less_s = [max(0.0, last["repeated_s"] - last["repeated_calls"] * factor * cached_s) for factor in factors]
    saves = [share * seconds / last["generate_s"] for seconds in less_s]
    again = last["positions"] / last["tokens"]
    return found("uncached-generation", last | locals(), "loop") if saves[1] >= WORTH_SAYING else []


def uncached_page(observed: Observed) -> list[Finding]:
    """Only whole-step throughput and the update's own MFU are stated. Their quotient is the update's share of the step."""
    facts, speed, mfu = observed.facts, observed.start("tokens_per_s"), observed.start("mfu")
    if not observed.peak_tflops or not speed or not mfu or not facts.gpus or facts.mfu_scope == "the step":
        return []
    parameters = facts.parameters or ASSUMED_PARAMETERS
    size = "stated" if facts.parameters else "assumed, as none is stated (--fact parameters=7B)"
    whole, alone = speed.middle, mfu.middle / 100 * observed.peak_tflops * 1e12 / (6 * parameters)
    update = min(1.0, whole / alone)
    rest, gain, step_s = 1 - update, (2.0, 1 / max(update, 0.02)), None
    if facts.batch_size and facts.prompt_length and facts.response_length:
        rows, length = facts.batch_size * (facts.samples or 1), facts.prompt_length + facts.response_length
        step_s = rows * length / (whole * facts.gpus)
        cached_s = facts.response_length * (decode_floor_s(observed, parameters=parameters) or 0.0)
        best = step_s / min(step_s, update * step_s + cached_s)
        gain = max(1.0, 0.5 * best), best
    return found("uncached-generation", locals(), "page", strength=0.75) if update <= 0.6 else []


def real_batch(observed: Observed) -> list[Finding]:
    """Samples drawn one question at a time in chunks: the chunk is the batch, whatever the settings say."""
    limit = re.findall(r"num_return_sequences >= (\d{1,9})", observed.text)
    names = ("CHUNK_SIZE", "MICRO_BATCH_SIZE", "oversample")
    chunk, claimed, drawn = (observed.setting(name, "after") or observed.setting(name) for name in names)
    if not limit or not chunk or not drawn or not (chunk.value + drawn.value).isdecimal():
        return []
    many = int(drawn.value)
    real, together, claim = min(int(chunk.value), many), 8 * many, f", not {claimed.value}" if claimed else ""
    slow_speed, fast_speed = GENERATED_TOGETHER[10], GENERATED_TOGETHER[240]
    gain, at = (8.0, fast_speed / slow_speed), int(limit[-1])
    return found("real-batch", locals()) if many >= at and drawn.when == "after" else []


def rewards(observed: Observed) -> list[Finding]:
    """Scores computed on the CPU while the GPUs wait."""
    reward_s, step_s = observed.part("reward") or observed.median("reward_s"), observed.median("step_s")
    share = reward_s / step_s if reward_s and step_s and observed.enough else 0.0
    return found("slow-reward", locals(), "own" if observed.kind == "run" else "")


def few_correct(observed: Observed) -> list[Finding]:
    """Rejection sampling that almost never finds a correct answer."""
    last = observed.last_event("sampling_end")
    samples, questions, correct = (last.get(name) for name in ("samples", "questions", "correct"))
    if not samples or not questions or correct is None or (hit := correct / samples) >= 0.1:
        return []
    drawn, solved = samples / questions, (last.get("solved") or 0) / questions
    return found("few-correct", locals(), strength=0.7)
