"""Generation inside training: far below what cached decoding gives, mostly something else than generating, held up by its
longest answer, in batches smaller than they seem, or of more samples than are needed.

With a cache of keys and values one decoding step reads every weight once, whatever the number of sequences: 2 bytes x
parameters / bandwidth is its floor. Without one it computes the whole prefix again for every token. A watched loop shows
which (observe/generation.py).
"""

import math
import re

from redline.diagnose.finding import Finding, Shown, found
from redline.diagnose.observed import Observed
from redline.diagnose.rules.update import WORTH_SAYING, last_event

ASSUMED_PARAMETERS = 1.5e9
"""Where a document does not state the model's size; the finding says so."""
DECODE_SHARE = 0.5
"""Share of the bandwidth that a good engine's decoding step reaches, attention and sampling included."""
ANY_BANDWIDTH = 900e9
"""Bytes/s of a V100: where the GPU is not named, the slowest that trains."""
SLOW_STEP_S = 0.05
"""A decoding step of a cached engine takes 5 to 30 ms on one GPU at up to 256 sequences; longer has another cause."""
CACHED_CALL = {"cpu": (0.75, 1.5), "cuda": (1.0, 1.6)}
"""What a call with a cache takes, in what is read off the calls without one: small products are slower, and the cache is
read and extended. On a GPU that comes on top, two kernels a layer; on a CPU it is little beside the products."""
ENGINES = ("vllm", "sglang", "trtllm")
"""Rollouts that always keep keys and values."""
LONG_TAIL = 4.0
"""From this many times the mean on, most rows of a generation have ended long before its longest one."""
GENERATED_TOGETHER = {10: 331.0, 240: 9_600.0, 1920: 24_900.0}
"""Tokens/s of transformers' `generate` by sequences in a call (H200, 360M parameters, measured for this project)."""
GRAPHS = (1.05, 1.5)
"""What CUDA graphs bring to the decoding of small batches."""
INSIDE = (
    *("generate sequences", "generation timing max"),
    *("agent loop slowest generate sequences", "agent loop generate sequences max"),
)
"""What verl calls the engine's own time inside `gen`."""


def decode_floor_s(bandwidth: float, parameters: float) -> float:
    """Time of one cached decoding step in half precision that a good engine reaches."""
    return 2 * parameters / (DECODE_SHARE * bandwidth)


def _floor_s(observed: Observed) -> float | None:
    """The same of this run's model on its GPU, where both are known."""
    spec, parameters = observed.spec, observed.facts.parameters
    return decode_floor_s(spec.memory_bandwidth_bytes_per_s, parameters) if spec and parameters else None


def _generation(observed: Observed) -> tuple[float, float, float] | None:
    """Seconds and share of a step that generation takes in a log that names it, and the step's; where worth a look."""
    gen_s, step_s = observed.part("gen") or observed.median("generate_s"), observed.median("step_s")
    if observed.format == "run" or not gen_s or not step_s or not observed.enough or gen_s / step_s < 0.2:
        return None
    return gen_s, min(1.0, gen_s / step_s), step_s


def _inside(observed: Observed) -> float | None:
    """What of it the engine spends generating, where the log tells it apart."""
    return next((value for name in INSIDE if (value := observed.part(name)) is not None), None)


def nested(observed: Observed) -> list[Finding]:
    """A generation phase that mostly does not generate: weights are copied into the engine, it wakes up and goes to
    sleep."""
    phase, inside_s = _generation(observed), _inside(observed)
    if phase is None or inside_s is None or inside_s > 0.5 * phase[0]:
        return []
    gen_s, share, step_s = phase
    rest = 1 - inside_s / gen_s
    shown = {"share": share, "rest": rest, "gen_s": gen_s, "inside_s": inside_s, "rest_s": gen_s - inside_s}
    batch, saves = observed.facts.batch_size or "not in the log", (0.5 * share * rest, share * rest)
    return found("nested-phases", observed, **shown, step_s=step_s, batch=batch, saves=saves)


def uncached(observed: Observed) -> list[Finding]:
    """Reinforcement learning whose generation computes every prefix again, or is as slow as if it did."""
    if observed.format == "run":
        return _uncached_loop(observed)
    if observed.format == "document":
        return _uncached_document(observed)
    return _uncached_log(observed)


def _uncached_log(observed: Observed) -> list[Finding]:
    """The log says how long generation took and how long the responses were: it ends with the longest."""
    facts, phase = observed.facts, _generation(observed)
    length = facts.longest_response or facts.response_length
    told = facts.use_cache == "false" or facts.rollout == "hf"
    apart = _inside(observed) is not None and not told
    if phase is None or not length or phase[1] < 0.3 or apart or facts.rollout in ENGINES:
        return []
    token_s, share, floor_s = phase[0] / length, phase[1], _floor_s(observed)
    row = (facts.prompt_length or 0.0) + (facts.response_length or 0.0)
    rows = (observed.median("tokens") or 0.0) / row / (facts.gpus or math.inf) if row else 0.0
    if not told and (token_s < (max(3 * floor_s, 0.02) if floor_s else SLOW_STEP_S) or rows > 256):
        return []
    reach_s = floor_s or SLOW_STEP_S / 2
    less = share * (1 - min(1.0, reach_s / token_s))
    reached = "ms, weights read once at half the bandwidth" if floor_s else "ms, what engines reach"
    shown: Shown = {
        "share": share,
        "token_s": token_s,
        "length": length,
        "reach_s": reach_s,
        "reached": reached,
    }
    shown |= {"rollout": facts.rollout, "use_cache": facts.use_cache, "saves": (0.6 * less, less)}
    return found("uncached-generation", observed, **shown, strength=1.0 if told else 0.65)


def slow(observed: Observed) -> list[Finding]:
    """Generation that takes most of the step and far longer than reading the weights once a token would, on any GPU."""
    facts, phase, spec = observed.facts, _generation(observed), observed.spec
    length = facts.longest_response or facts.response_length
    apart = _inside(observed) is not None
    if phase is None or phase[1] < 0.5 or apart or not length or not facts.parameters or uncached(observed):
        return []
    (gen_s, share, step_s), token_s = phase, phase[0] / length
    bandwidth = spec.memory_bandwidth_bytes_per_s if spec else ANY_BANDWIDTH
    floor_s = decode_floor_s(bandwidth, facts.parameters) / (facts.gpus or 1)
    if token_s < 3 * floor_s:
        return []
    shown: Shown = {"share": share, "gen_s": gen_s, "step_s": step_s, "token_s": token_s, "length": length}
    shown |= {"floor_s": floor_s, "of": "" if spec else " of a V100"}
    saves = (0.4 * share, share * (1 - floor_s / token_s))
    return found("slow-generation", observed, **shown, saves=saves, strength=0.8)


def long_tail(observed: Observed) -> list[Finding]:
    """Generation that ends with a few long responses, while the other rows have ended."""
    facts, phase = observed.facts, _generation(observed)
    timed = [observed.part(f"agent loop generate sequences {which}") for which in ("max", "mean")]
    longest, mean = timed if all(timed) else (facts.longest_response, facts.response_length)
    if phase is None or phase[1] < 0.3 or facts.rollout == "hf":
        return []
    if not longest or not mean or longest < LONG_TAIL * mean:
        return []
    shown: Shown = {"share": phase[1], "times": longest / mean, "longest": longest, "mean": mean}
    shown |= {"rollout": facts.rollout, "unit": "s" if all(timed) else "tokens"}
    saves = (0.0, phase[1] * (1 - mean / longest))
    return found("long-tail", observed, **shown, saves=saves, strength=0.8 if all(timed) else 0.5)


def eager(observed: Observed) -> list[Finding]:
    """An engine that launches every kernel of a decoding step by hand."""
    phase, inside_s = _generation(observed), _inside(observed)
    if observed.facts.eager_rollout != "true" or phase is None:
        return []
    if inside_s is not None and inside_s < 0.5 * phase[0]:
        return []
    low, high = (phase[1] * (1 - 1 / factor) for factor in GRAPHS)
    shown = {"share": phase[1], "gen_s": phase[0], "step_s": phase[2], "eager": "True"}
    return found("eager-generation", observed, **shown, saves=(low, high), strength=0.8)


def _uncached_loop(observed: Observed) -> list[Finding]:
    """A watched loop: the model's calls were noted in some updates, and those that computed the prefix again are
    counted."""
    last, facts = last_event(observed, "generation"), observed.facts
    share = observed.share("generate_s")
    if "repeated_s" not in last or not observed.mean("step_s") or not share:
        return []
    cached_s = max(_floor_s(observed) or 0.0, last["cached_call_s"])
    factors = reversed(CACHED_CALL["cuda" if facts.gpu else "cpu"])
    less_s = [max(0.0, last["repeated_s"] - last["repeated_calls"] * factor * cached_s) for factor in factors]
    low, high = (share * seconds / last["generate_s"] for seconds in less_s)
    if high < WORTH_SAYING:
        return []
    shown = {"share": share, "again": last["positions"] / last["tokens"], "cached_s": cached_s}
    calls = {f"{which}_s": last[f"{which}_call_s"] for which in ("first", "last")}
    return found("uncached-generation", observed, "loop", **shown, **calls, saves=(low, high))


def _uncached_document(observed: Observed) -> list[Finding]:
    """Only whole-step throughput and the update's own MFU are stated. Their quotient is the update's share of the step."""
    facts, spec = observed.facts, observed.spec
    speed, mfu = (
        next((c.before for c in observed.claims if c.name == name and c.before), None)
        for name in ("tokens_per_s", "mfu")
    )
    if spec is None or not spec.bf16_tflops or speed is None or mfu is None or not facts.gpus:
        return []
    parameters = facts.parameters or ASSUMED_PARAMETERS
    whole = math.sqrt(speed.low * speed.high)
    alone = math.sqrt(mfu.low * mfu.high) / 100 * spec.bf16_tflops * 1e12 / (6 * parameters)
    update = min(1.0, whole / alone)
    if facts.mfu_scope == "the step" or update > 0.6:
        return []
    shown: Shown = {"whole": whole, "alone": alone, "update": update, "rest": 1 - update}
    shown["parameters"] = parameters
    shown["size"] = "stated" if facts.parameters else "assumed, as none is stated (--fact parameters=7B)"
    gain = (2.0, 1 / max(update, 0.02))
    if facts.batch_size and facts.prompt_length and facts.response_length:
        rows, length = facts.batch_size * (facts.samples or 1), facts.prompt_length + facts.response_length
        step_s = rows * length / (whole * facts.gpus)
        cached_s = facts.response_length * decode_floor_s(spec.memory_bandwidth_bytes_per_s, parameters)
        best = step_s / min(step_s, update * step_s + cached_s)
        shown |= {"step_s": step_s, "rows": rows, "length": length, "cached_s": cached_s}
        shown["response"] = facts.response_length
        gain = (max(1.0, 0.5 * best), best)
    return found("uncached-generation", observed, "page", **shown, gain=gain, strength=0.75)


def real_batch(observed: Observed) -> list[Finding]:
    """Samples drawn one question at a time in chunks: the batch on the GPU is the chunk, whatever the batch settings
    say."""
    text = observed.text if observed.format == "document" else ""
    limit = re.findall(r"num_return_sequences >= (\d{1,9})", text)
    chunk, claimed, drawn = (
        observed.setting(name, "after") or observed.setting(name)
        for name in ("CHUNK_SIZE", "MICRO_BATCH_SIZE", "oversample")
    )
    if not limit or not chunk or not drawn or not (chunk.value + drawn.value).isdigit():
        return []
    many, size = int(drawn.value), int(chunk.value)
    if many < int(limit[-1]) or drawn.when != "after":
        return []
    shown: Shown = {"real": min(size, many), "drawn": many, "drawn_line": drawn.line, "together": 8 * many}
    shown |= {"limit": int(limit[-1]), "chunk": size, "chunk_line": chunk.line}
    told: Shown = {"claim": f", not {claimed.value}" if claimed else ""}
    told |= {"claimed": int(claimed.value) if claimed and claimed.value.isdigit() else None}
    slow_speed, fast_speed = GENERATED_TOGETHER[10], GENERATED_TOGETHER[240]
    gain = (8.0, fast_speed / slow_speed)
    return found("real-batch", observed, **shown, **told, slow=slow_speed, fast=fast_speed, gain=gain)


def rewards(observed: Observed) -> list[Finding]:
    """Scores computed on the CPU while the GPUs wait."""
    reward_s, step_s = observed.part("reward"), observed.median("step_s")
    if not reward_s or not step_s or not observed.enough or (share := reward_s / step_s) < 2 * WORTH_SAYING:
        return []
    own, saves = "own" if observed.format == "run" else "", (0.7 * share, share)
    return found("slow-reward", observed, own, share=share, reward_s=reward_s, step_s=step_s, saves=saves)


def lessons(observed: Observed) -> list[Finding]:
    """Answers drawn and thrown away: all answers to their question earned the same."""
    groups, skipped = (
        sum(step.more.get(name, 0.0) for step in observed.steady) for name in ("groups", "skipped groups")
    )
    if not observed.enough or not groups or (wasted := skipped / groups) < 0.3:
        return []
    saves = (0.0, wasted * observed.share("generate_s"))
    return found("few-lessons", observed, wasted=wasted, skipped=skipped, groups=groups, saves=saves)


def samples_to_spare(observed: Observed) -> list[Finding]:
    """Rejection sampling that draws more than it needs, or hardly ever hits."""
    last = last_event(observed, "sampling_end")
    if any(last.get(name) is None for name in ("correct", "solved")) or not last.get("samples"):
        return []
    if not (questions := last.get("questions")):
        return []
    hit, drawn = last["correct"] / last["samples"], last["samples"] / questions
    shown = {"hit": hit, "drawn": drawn, "samples": last["samples"], "solved": last["solved"] / questions}
    if hit < 0.1:
        return found("few-correct", observed, **shown, gain=(1.0, 3.0), strength=0.7)
    enough = math.log(0.05) / math.log(1 - min(hit, 0.95))
    if enough * 1.5 > drawn:
        return []
    return found("spare-samples", observed, **shown, enough=enough, gain=(1.0, drawn / enough), strength=0.7)


RULES = (nested, uncached, slow, long_tail, eager, real_batch, rewards, lessons, samples_to_spare)
