"""Generation: far below what cached decoding gives, in batches smaller than they seem, or of more samples
than are needed.

With a cache of keys and values one decoding step reads every weight once, whatever the number of sequences: 2
bytes x parameters / bandwidth is its floor. Without one it computes the whole prefix again for every token. A
watched loop shows which (observe/generation.py).
"""

import math
import re
from typing import Any

from redline.diagnose.causes import WORTH_SAYING, enough, saved
from redline.diagnose.claims import spec_of
from redline.diagnose.finding import Evidence, Finding, Gain
from redline.diagnose.observed import Observed
from redline.machine.specs import GpuSpec

ASSUMED_PARAMETERS = 1.5e9
"""Where a document does not state the model's size; the finding says so."""
DECODE_SHARE = 0.5
"""Share of the bandwidth that a good engine's decoding step reaches, attention and sampling included."""
SLOW_STEP_S = 0.05
"""A decoding step of a cached engine takes 5 to 30 ms on one GPU at up to 256 sequences; longer has another
cause."""
CACHED_CALL = {"cpu": (0.75, 1.5), "cuda": (1.0, 1.6)}
"""What a call with a cache takes, in what is read off the calls without one: small products are slower, and
the cache is read and extended. On a GPU that comes on top, two kernels a layer; on a CPU it is little beside
the products."""
ENGINES = ("vllm", "sglang", "trtllm")
"""Rollouts that always keep keys and values."""
LONG_TAIL = 4.0
"""From this many times the mean on, most rows of a generation have ended long before its longest one."""
GENERATED_TOGETHER = {10: 331.0, 240: 9_600.0, 1920: 24_900.0}
"""Tokens/s of transformers' `generate` by sequences in a call (H200, 360M parameters, measured for this
project)."""


def uncached(observed: Observed) -> list[Finding]:
    """Reinforcement learning whose generation computes every prefix again, or is as slow as if it did."""
    if observed.format == "verl":
        return [] if observed.facts.rollout in ENGINES else _uncached_log(observed)
    if observed.format == "run":
        return _uncached_loop(observed)
    if observed.format == "document" and observed.facts.mfu_scope == "the actor's update":
        return _uncached_document(observed)
    return []


def _uncached_log(observed: Observed) -> list[Finding]:
    """verl says how long generation took and how long the responses were: it ends with the longest."""
    gen_s, step_s = observed.part("gen"), observed.median("step_s")
    length = observed.facts.longest_response or observed.facts.response_length
    if not gen_s or not step_s or not enough(observed) or gen_s / step_s < 0.3 or not length:
        return []
    token_s, spec, facts = gen_s / length, spec_of(observed), observed.facts
    floor = decode_floor_s(spec, facts.parameters) if spec and facts.parameters else None
    told = facts.use_cache == "false" or facts.rollout == "hf"
    limit_s = max(3 * floor, 0.02) if floor else SLOW_STEP_S
    rows = _rows_per_gpu(observed)
    if not told and (token_s < limit_s or (rows or 0) > 256):
        return []
    reach_s = floor or SLOW_STEP_S / 2
    share = gen_s / step_s
    evidence = [
        Evidence("generation", share, "of the step"),
        Evidence(
            "one decoding step",
            token_s * 1e3,
            f"ms (generation over the {length:.0f} tokens of the longest response)",
        ),
        Evidence(
            "with a cache",
            reach_s * 1e3,
            "ms, weights read once at half the bandwidth" if floor else "ms, what engines reach",
        ),
    ]
    if facts.rollout:
        evidence.append(Evidence("rollout.name", facts.rollout, "from the log"))
    if facts.use_cache:
        evidence.append(Evidence("use_cache", facts.use_cache, "from the log"))
    less = share * (1 - min(1.0, reach_s / token_s))
    return [
        Finding(
            cause="uncached-generation",
            kind="cause",
            title=(
                f"Generation takes {share:.0%} of the step, {token_s * 1e3:.0f} ms a token: no key/value"
                " cache, or eager attention"
            ),
            evidence=tuple(evidence),
            fix=(
                "rollout.name=vllm or sglang; with Hugging Face use_cache=True and attn_implementation=sdpa."
                " A larger training batch does not help"
            ),
            gain=saved(
                step_s, 0.6 * less, less, "generation at the speed of cached decoding, the rest as it is"
            ),
            confidence=0.95 if told else 0.6,
        )
    ]


def long_tail(observed: Observed) -> list[Finding]:
    """Generation that ends with a few long responses, while the other rows have ended."""
    gen_s, step_s, facts = observed.part("gen"), observed.median("step_s"), observed.facts
    longest, mean = facts.longest_response, facts.response_length
    if not longest or not mean or longest < LONG_TAIL * mean or facts.rollout == "hf":
        return []
    if not gen_s or not step_s or not enough(observed) or gen_s / step_s < 0.3:
        return []
    share = gen_s / step_s
    return [
        Finding(
            cause="long-tail",
            kind="cause",
            title=(
                f"Generation takes {share:.0%} of the step and waits for responses {longest / mean:.0f} times"
                " as long as the mean"
            ),
            evidence=(
                Evidence("generation", share, "of the step"),
                Evidence("longest response", longest, "tokens, median of the steps"),
                Evidence("mean response", mean, "tokens"),
                Evidence(
                    "rollout.name", facts.rollout or "not in the log", "from the log" if facts.rollout else ""
                ),
            ),
            fix=(
                "generate the next batch while this one trains (an asynchronous rollout: verl's"
                " recipe/fully_async_policy or one_step_off_policy), or cut the tail with a smaller"
                " data.max_response_length: that is another task, as long answers are lost"
            ),
            gain=saved(
                step_s,
                0.0,
                share * (1 - mean / longest),
                "at best generation takes as long as for responses of the mean length",
            ),
            confidence=0.4,
        )
    ]


def _uncached_loop(observed: Observed) -> list[Finding]:
    """A watched loop: the model's calls were noted in some updates, and those that computed the prefix again
    are counted."""
    last: dict[str, Any] = next(
        (event for event in reversed(observed.events) if event.get("event") == "generation"), {}
    )
    mean_s, share = observed.mean("step_s"), observed.share("generate_s")
    if "repeated_s" not in last or not mean_s or not share:
        return []
    spec, factors = spec_of(observed), CACHED_CALL["cuda" if observed.facts.gpu else "cpu"]
    floor_s = decode_floor_s(spec, observed.facts.parameters) if spec and observed.facts.parameters else 0.0
    cached_s = max(floor_s, last["cached_call_s"])
    less_s = [
        max(0.0, last["repeated_s"] - last["repeated_calls"] * factor * cached_s)
        for factor in reversed(factors)
    ]
    low, high = (share * seconds / last["generate_s"] for seconds in less_s)
    if high < WORTH_SAYING:
        return []
    again = last["positions"] / last["tokens"]
    return [
        Finding(
            cause="uncached-generation",
            kind="cause",
            title=(
                f"Generation takes {share:.0%} of the step and computes {again:.0f} positions for each token:"
                " no key/value cache"
            ),
            evidence=(
                Evidence("generation", share, "of the step"),
                Evidence(
                    "positions computed",
                    again,
                    "for each token generated; 1 with a cache, and the prompt once",
                ),
                Evidence(
                    "a call of the model",
                    last["first_call_s"] * 1e3,
                    f"ms at first, {last['last_call_s'] * 1e3:.3g} at the end",
                ),
                Evidence(
                    "with a cache", cached_s * 1e3, "ms a call, from how the host's time grows with positions"
                ),
            ),
            fix=(
                "generate(..., use_cache=True), and use_cache in the model's config; gradient checkpointing"
                " switches the cache off: turn it off while generating. An engine (vLLM, SGLang, `redline"
                " generate`) always has one"
            ),
            gain=saved(
                mean_s, low, high, "calls of one position a row, prompts and everything else as they are"
            ),
            confidence=0.9,
        )
    ]


def decode_floor_s(spec: GpuSpec, parameters: float) -> float:
    """Time of one cached decoding step in half precision that a good engine reaches."""
    return 2 * parameters / (DECODE_SHARE * spec.memory_bandwidth_bytes_per_s)


def _rows_per_gpu(observed: Observed) -> float | None:
    facts, tokens = observed.facts, observed.median("tokens")
    length = (facts.prompt_length or 0.0) + (facts.response_length or 0.0)
    return tokens / length / facts.gpus if tokens and length and facts.gpus else None


def _uncached_document(observed: Observed) -> list[Finding]:
    """Only whole-step throughput and the update's own MFU are stated. Their quotient is the update's share of
    the step."""
    facts, spec = observed.facts, spec_of(observed)
    speed = next((c.before for c in observed.claims if c.name == "tokens_per_s" and c.before), None)
    mfu = next((c.before for c in observed.claims if c.name == "mfu" and c.before), None)
    if spec is None or speed is None or mfu is None or not facts.gpus or not spec.bf16_tflops:
        return []
    parameters = facts.parameters or ASSUMED_PARAMETERS
    per_gpu, share_mfu = math.sqrt(speed.low * speed.high), math.sqrt(mfu.low * mfu.high) / 100
    update = min(1.0, per_gpu * 6 * parameters / (share_mfu * spec.bf16_tflops * 1e12))
    if update > 0.6:
        return []
    size = "stated" if facts.parameters else "assumed, as none is stated (--fact parameters=7B)"
    evidence = [
        Evidence("whole step", per_gpu, "tokens/s of one GPU"),
        Evidence(
            "update alone",
            share_mfu * spec.bf16_tflops * 1e12 / (6 * parameters),
            "tokens/s of one GPU, from its MFU",
        ),
        Evidence("update", update, "of the step; the rest generates and scores"),
        Evidence("parameters", parameters, size),
    ]
    gain = Gain(2.0, 1 / max(update, 0.02), "everything but the update gone at best")
    if facts.batch_size and facts.prompt_length and facts.response_length:
        rows = facts.batch_size * (facts.samples or 1)
        step_s = rows * (facts.prompt_length + facts.response_length) / (per_gpu * facts.gpus)
        cached_s = facts.response_length * decode_floor_s(spec, parameters)
        evidence.append(
            Evidence(
                "step",
                step_s,
                f"s for {rows:.0f} rows of {facts.prompt_length + facts.response_length:.0f} tokens",
            )
        )
        evidence.append(
            Evidence("cached decoding", cached_s, f"s for {facts.response_length:.0f} tokens a row")
        )
        best = step_s / min(step_s, update * step_s + cached_s)
        gain = Gain(max(1.0, 0.5 * best), best, "the update as it is, and generation at half the bandwidth")
    return [
        Finding(
            cause="uncached-generation",
            kind="cause",
            title=f"{1 - update:.0%} of the step is not the update: generation is slow, not the batch small",
            evidence=tuple(evidence),
            fix=(
                "generate with a cache of keys and values (rollout.name=vllm; Hugging Face: use_cache=True,"
                " attn_implementation=sdpa), many rows at once; look at timing_s/gen in the log"
            ),
            gain=gain,
            confidence=0.7,
        )
    ]


def real_batch(observed: Observed) -> list[Finding]:
    """Samples drawn one question at a time in chunks: the batch on the GPU is the chunk, whatever the batch
    settings say."""
    limit = re.findall(r"num_return_sequences >= (\d+)", observed.text)
    chunk, drawn = (
        observed.setting("CHUNK_SIZE", "after") or observed.setting("CHUNK_SIZE"),
        observed.setting("oversample", "after"),
    )
    claimed = observed.setting("MICRO_BATCH_SIZE", "after") or observed.setting("MICRO_BATCH_SIZE")
    if (
        not limit
        or not chunk
        or not drawn
        or not chunk.value.isdigit()
        or not drawn.value.isdigit()
        or int(drawn.value) < int(limit[-1])
    ):
        return []
    real = min(int(chunk.value), int(drawn.value))
    evidence = [
        Evidence("samples a question", int(drawn.value), f"(line {drawn.line})"),
        Evidence("one question at a time from", int(limit[-1]), "samples on"),
        Evidence("in chunks of", int(chunk.value), f"sequences (line {chunk.line})"),
    ]
    if claimed and claimed.value.isdigit():
        evidence.append(
            Evidence("micro-batch claimed", int(claimed.value), "never reached: it counts questions")
        )
    slow, fast = GENERATED_TOGETHER[10], GENERATED_TOGETHER[240]
    return [
        Finding(
            cause="real-batch",
            kind="cause",
            title=f"The real batch on the GPU is {real} sequences"
            + (f", not {claimed.value}" if claimed else ""),
            evidence=tuple(evidence),
            fix=(
                f"draw the samples of many questions in one call: 8 questions x {drawn.value} are"
                f" {8 * int(drawn.value)} sequences; `redline rft sample` fills as many slots as memory holds"
            ),
            gain=Gain(
                8.0,
                fast / slow,
                f"generate measured {slow:.0f} tokens/s at 10 sequences and {fast:,.0f} at 240 (H200, 360M"
                " parameters)",
            ),
            confidence=0.9,
        )
    ]


def rewards(observed: Observed) -> list[Finding]:
    """Scores computed on the CPU while the GPUs wait."""
    reward_s, step_s = observed.part("reward"), observed.median("step_s")
    if not reward_s or not step_s or not enough(observed) or reward_s / step_s < 2 * WORTH_SAYING:
        return []
    share = reward_s / step_s
    return [
        Finding(
            cause="slow-reward",
            kind="cause",
            title=f"Computing rewards takes {share:.0%} of the step",
            evidence=(Evidence("timing_s/reward", reward_s, "s"), Evidence("timing_s/step", step_s, "s")),
            fix=(
                "score in a pool of processes while generation still runs"
                " (reward_model.launch_reward_fn_async=True)"
            ),
            gain=saved(step_s, 0.7 * share, share, "rewards hidden behind generation"),
            confidence=0.8,
        )
    ]


def samples_to_spare(observed: Observed) -> list[Finding]:
    """Rejection sampling that draws more than it needs, or hardly ever hits."""
    ends = [
        event
        for event in observed.events
        if event["event"] == "sampling_end" and event.get("samples") and event.get("questions")
    ]
    if not ends:
        return []
    last = ends[-1]
    hit, drawn = last["correct"] / last["samples"], last["samples"] / last["questions"]
    evidence = (
        Evidence("correct", hit, f"of {last['samples']:,} samples"),
        Evidence("samples a question", drawn, "drawn on average"),
        Evidence("solved", last["solved"] / last["questions"], "of the questions"),
    )
    if hit < 0.1:
        fix = "a lower temperature, a few worked examples in the prompt, or a larger model to sample from"
        title = f"Only {hit:.0%} of the samples are correct"
        return [
            Finding(
                cause="few-correct",
                kind="cause",
                title=title,
                evidence=evidence,
                fix=fix,
                gain=Gain(1.0, 3.0, "correct samples a second"),
                confidence=0.5,
            )
        ]
    enough = math.log(0.05) / math.log(1 - min(hit, 0.95))
    if enough * 1.5 > drawn:
        return []
    title = (
        f"{drawn:.0f} samples a question, where {enough:.0f} would solve 95 % of the questions at this hit"
        " rate"
    )
    gain = Gain(1.0, drawn / enough, "of sampling; questions differ, so the hard ones still need more")
    return [
        Finding(
            cause="spare-samples",
            kind="cause",
            title=title,
            evidence=evidence,
            fix="fewer samples a question, or stop at the first correct ones",
            gain=gain,
            confidence=0.5,
        )
    ]


RULES = (uncached, long_tail, real_batch, rewards, samples_to_spare)
