"""`redline bench generate`: our engine against `transformers` on the same model and the same work, in one run.

    path = bench_generate("full", facts, Path("benchmarks"), ceilings=ceilings, ...)  # generate_<hardware>_<date>.{json,md}

`transformers`   its `generate` with growing batches, then its continuous batching; the same weights, bf16 on a GPU.
`redline`        our engine with more and more sequences, with shared and with distinct prompts; and mixed lengths.

Each side runs in its own process and yields a row per measurement, so a crash keeps what was measured before it. No
sequence ends before its length, so both do the same work. A row's floor is the least time the machine would need: read
the weights once a step and the keys and values of every token at the measured copy bandwidth, then multiply at the
measured rate. Left out, so that it stays a lower bound: logits, activations, writes, sampling.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from redline.bench.results import MEASURED, SMOLLM2_360M, TINY, Bench, BenchRow, run_arms, shape
from redline.bench.theirs import batching_options, model_of, prompts_of
from redline.config.recipe import ModelConfig
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.errors import need
from redline.machine.store import Ceilings
from redline.measure.child import device, empty, half, peak_bytes, timed
from redline.measure.generation import words_tokenizer
from redline.model.transformer import Transformer, build_model
from redline.plan.arithmetic import BYTES
from redline.plan.roofline import generation_floor_s
from redline.record.units import format_duration

TEMPERATURE = 0.8
"""Temperature of all sampled rows; no top-k or top-p."""


@dataclass(frozen=True, kw_only=True)
class GenerationWork:
    model: ModelConfig
    prompt_tokens: int
    new_tokens: int
    batches: tuple[tuple[int, int], ...]
    """Prompts and samples of each for `transformers`, rising; past the headline ones it stops when one is slower."""
    continuous: tuple[int, int]
    """Prompts and samples for its continuous batching."""
    samples: int
    """Samples per prompt, for our engine."""
    sequences: tuple[int, ...]
    """Sequences generated together by our engine."""
    mixed_slots: int
    mixed_lengths: tuple[int, int]
    repeats: int
    """Timed runs of a row after a warm-up; fewer for `transformers` if they would take longer than `patience_s`."""
    patience_s: float


WORKS = {
    "full": GenerationWork(
        model=SMOLLM2_360M, prompt_tokens=96, new_tokens=128,
        batches=((1, 10), (8, 30), (32, 30), (64, 30), (128, 30)), continuous=(8, 30), samples=30,
        sequences=(1, 32, 256, 1024, 2048), mixed_slots=512, mixed_lengths=(8, 256),
        repeats=3, patience_s=10.0,
    ),
    "quick": GenerationWork(
        model=replace(TINY, init_std=0.2), prompt_tokens=6, new_tokens=8, batches=((1, 2), (2, 2)),
        continuous=(2, 2), samples=2, sequences=(1, 4), mixed_slots=4, mixed_lengths=(2, 12),
        repeats=2, patience_s=10.0,
    ),
}  # fmt: skip
HEADLINE = 2
"""Batches of `transformers` that are always measured: the public recipes' usual setting and their best one."""
MIXED_WAVES = 8
"""Sequences per slot when lengths are mixed; with 4, waiting for the last would keep any engine below 77%."""


def mixed_lengths(work: GenerationWork) -> list[int]:
    """New tokens of each sequence when lengths are mixed; the same in every run."""
    draw = random.Random(0)
    return [draw.randint(*work.mixed_lengths) for _ in range(MIXED_WAVES * work.mixed_slots)]


def most_occupancy(work: GenerationWork) -> float:
    """Slot occupancy of an engine that refills a slot in the next step; below 1 because of the last sequences."""
    decoded, slots = [length - 1 for length in mixed_lengths(work)], [0] * work.mixed_slots
    for steps in decoded:
        heapq.heapreplace(slots, slots[0] + steps)
    return sum(decoded) / (work.mixed_slots * max(slots))


def _summary(row: BenchRow, _rows: Any, work: GenerationWork, ceilings: Ceilings) -> BenchRow:
    if "seconds" not in row or not row["row"].startswith("redline"):
        return {}
    cuda = ceilings.device != "cpu"
    dtype = "bf16" if cuda else "fp32"
    rate = (ceilings.matmul_tflops("bf16") or 0.0) * 1e12 if cuda else ceilings.cpu_matmul_gflops * 1e9
    bandwidth = ceilings.copy_bytes_per_s if cuda else ceilings.cpu_copy_bytes_per_s
    mixed = row["row"] == "redline_mixed"
    found: BenchRow = {"most_occupancy": most_occupancy(work)} if mixed else {}
    if not bandwidth or not rate:
        return found
    lengths = mixed_lengths(work) if mixed else [work.new_tokens] * row["sequences"]
    for name, shared in (("floor", False), ("floor_shared", True)):
        seconds = generation_floor_s(
            work.model, prompts=row["prompts"], prompt_tokens=work.prompt_tokens, new_tokens=lengths,
            slots=row["slots"], bytes_per_value=BYTES[dtype], bytes_per_s=bandwidth, flops_per_s=rate,
            shared=shared,
        )  # fmt: skip
        found |= {f"{name}_s": seconds, f"share_of_{name}": seconds / median(row["seconds"])}
    return found


LABELS = {
    "generate": "transformers `generate`",
    "continuous": "transformers continuous batching",
    "redline": "redline",
    "redline_mixed": "redline, mixed lengths",
    "transformers": "transformers",
}


def _about(work: GenerationWork) -> list[str]:
    return [
        f"{shape(work.model)}; prompts of {work.prompt_tokens} tokens, {work.new_tokens} new tokens each,"
        f" temperature {TEMPERATURE}. Median of the timed runs; interval: slowest to fastest; compared with `generate`"
        " {}x{}.".format(*work.batches[HEADLINE - 1]),
        "Floor: weights once a step, keys and values once a token, at the measured copy bandwidth, and the"
        " multiplications at the measured rate; in brackets with the keys and values of a prompt read once for all"
        " of its samples.",
    ]


def _findings(rows: Sequence[BenchRow], _work: GenerationWork) -> list[str]:
    best, found = dict[str, float](), list[str]()
    for row in rows:
        if "tokens_per_s" in row:
            best[row["row"]] = max(row["tokens_per_s"], best.get(row["row"], 0.0))
    if "generate" in best and "redline" in best:
        times = best["redline"] / best["generate"]
        found.append(f"Best of redline: {times:.1f} times the tokens/s of the best of transformers.")
    return found + [
        f"Mixed lengths, {MIXED_WAVES} sequences per slot: slot occupancy {row['occupancy']:.1%} (decoded"
        f" tokens over {row['slots']:,} slots x {row['decode_steps']:,} steps;"
        f" {row['most_occupancy']:.1%} is the most that this order of lengths allows);"
        f" {row['row_occupancy']:.1%} of the rows computed were useful."
        for row in rows
        if "occupancy" in row
    ]


COMPARED = [work.batches[HEADLINE - 1] for work in WORKS.values()]
BENCH = Bench(
    verb="generate",
    title="Generation",
    works=WORKS,
    arm="redline.bench.generate:{arm}",
    columns=(
        ("arm", LABELS.get, "row"),
        ("prompts", "{:,}".format, "prompts"),
        ("samples", str, "samples"),
        ("sequences", "{:,}".format, "sequences"),
        *MEASURED,
        ("runs", len, "seconds"),
        ("against `generate`", "{:.2f}x".format, "against"),
        ("share of the floor", "{:.0%} ({:.0%})".format, "share_of_floor", "share_of_floor_shared"),
        ("first run", format_duration, "first_run_s"),
    ),
    reference=lambda other, _: (
        other["row"] == "generate" and (other["prompts"], other["samples"]) in COMPARED
    ),
    about=_about,
    findings=_findings,
    summary=_summary,
)
bench_generate = partial(run_arms, BENCH)


# ---- the arms, each in its process; a row is timed after a warm-up of the same work ----

WARM_TOKENS = 4
"""New tokens of a batch's warm-up with `transformers`: it compiles nothing, so a short one loads all kernels."""


def _timed(work: Callable[[], Any], times: int, patience_s: float = float("inf")) -> list[float]:
    """Seconds of each run: as many as asked, or until another would exceed the patience."""
    seconds = [timed(1, work)]
    while len(seconds) < times and sum(seconds) + seconds[-1] <= patience_s:
        seconds.append(timed(1, work))
    return seconds


# ---- transformers ----


def transformers(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    fastest, theirs = 0.0, model_of(
        work.model,  # nothing keeps our weights, which would count in the peaks
        dict(build_model(work.model, device=device(), seed=0).named_parameters()),
        device=device(), dtype=half(),
    ).eval()  # fmt: skip
    for number, (prompts, samples) in enumerate(work.batches):
        row = _generate(theirs, work, prompts, samples)
        yield row
        speed = row["tokens"] / min(row["seconds"]) if "seconds" in row else 0.0
        if number >= HEADLINE and speed < fastest:
            break
        fastest = max(fastest, speed)
    yield _continuous(theirs, work)


def _sampled(new_tokens: int, samples: int) -> Any:
    hf = need("transformers", extra="hf")
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    return hf.GenerationConfig(max_new_tokens=new_tokens, num_return_sequences=samples, **how)


def _generate(theirs: Any, work: GenerationWork, prompts: int, samples: int) -> BenchRow:
    input_ids = torch.tensor(prompts_of(work, prompts), device=device())

    def run(new_tokens: int) -> None:
        found: Tensor = theirs.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=_sampled(new_tokens, samples),
        )
        assert found.shape == (prompts * samples, work.prompt_tokens + new_tokens), found.shape

    return _measured(_row("generate", work, prompts, samples, prompts * samples), work, run)


def _measured(row: BenchRow, work: GenerationWork, run: Callable[[int], None]) -> BenchRow:
    """The row with what a run of so many new tokens took, or `failed`."""
    empty()
    try:
        row["first_run_s"] = timed(1, lambda: run(WARM_TOKENS))
        row["seconds"] = _timed(lambda: run(work.new_tokens), work.repeats, work.patience_s)
    except Exception as error:  # noqa: BLE001  (a peer's row: whatever it raises is its result)
        said = str(error).splitlines()[0][:150] if str(error) else ""
        return row | {"failed": f"{type(error).__name__}: {said}"}
    return row | {"memory_bytes": peak_bytes()}


def _row(name: str, work: GenerationWork, prompts: int, samples: int, sequences: int) -> BenchRow:
    facts = {"prompts": prompts, "samples": samples, "sequences": sequences}
    return {"row": name, **facts, "tokens": sequences * work.new_tokens}


def _continuous(theirs: Any, work: GenerationWork) -> BenchRow:
    prompts, samples = work.continuous
    inputs = [ids for ids in prompts_of(work, prompts) for _ in range(samples)]
    config = need("transformers", extra="hf").ContinuousBatchingConfig(**batching_options())

    def run(new_tokens: int) -> None:
        found = theirs.generate_batch(
            inputs=inputs,
            generation_config=_sampled(work.new_tokens, 1),
            continuous_batching_config=config,
            persistent_manager=True,  # otherwise every call allocates its cache and captures its graphs again
            max_new_tokens=new_tokens,
        )
        lengths = {len(output.generated_tokens) for output in found.values()}
        # if it fails inside, it returns what it has
        if len(found) != len(inputs) or lengths != {new_tokens}:
            texts = f"{len(found)} of {len(inputs)} texts"
            raise RuntimeError(f"{texts}, of {lengths} instead of {new_tokens} tokens")

    # the first call sizes the manager: as many texts as the timed ones, whose tokens its blocks of 256 hold too
    row = _measured(_row("continuous", work, prompts, samples, len(inputs)), work, run)
    theirs.destroy_cached_continuous_batching_manager()
    return row


# ---- our engine ----


def redline(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    model = build_model(work.model, device=device(), seed=0).eval()
    model.compute_dtype = half()
    for sequences in work.sequences:
        with _engine(model, work, slots=sequences, max_new_tokens=work.new_tokens) as engine:
            for samples in (work.samples, 1) if sequences > 1 else (1,):
                yield _ours(engine, work, sequences, samples)
    yield _mixed(model, work)


def _engine(model: Transformer, work: GenerationWork, *, slots: int, max_new_tokens: int) -> LocalEngine:
    empty()
    tokenizer, longest = words_tokenizer(work.model.vocab_size), work.prompt_tokens
    return LocalEngine(
        model, tokenizer, slots=slots, max_prompt_tokens=longest, max_new_tokens=max_new_tokens
    )


def _requests(work: GenerationWork, sequences: int, samples: int) -> list[Request]:
    """As many prompts as needed; the last has fewer samples if they do not divide evenly."""
    sampling = Sampling(max_new_tokens=work.new_tokens, temperature=TEMPERATURE)
    prompts = prompts_of(work, -(-sequences // samples))
    counts = [min(samples, sequences - number * samples) for number in range(len(prompts))]
    return [
        Request(prompt=tuple(ids), sampling=sampling, samples=count, seed=0)
        for ids, count in zip(prompts, counts, strict=True)
    ]


def _complete(engine: LocalEngine, requests: Sequence[Request]) -> None:
    found = list(engine.run(requests))
    for completion in found:
        assert len(completion.tokens) == completion.request.sampling.max_new_tokens
    assert len(found) == sum(request.samples for request in requests)


def _run(engine: LocalEngine, requests: Sequence[Request], times: int) -> dict[str, Any]:
    first_run_s = timed(1, lambda: _complete(engine, requests))
    seconds = _timed(lambda: _complete(engine, requests), times)
    return {"first_run_s": first_run_s, "seconds": seconds, "memory_bytes": peak_bytes()}


def _ours(engine: LocalEngine, work: GenerationWork, sequences: int, samples: int) -> BenchRow:
    requests = _requests(work, sequences, samples)
    row = _row("redline", work, len(requests), samples, sequences)
    return row | {"slots": sequences, **_run(engine, requests, work.repeats)}


def _mixed(model: Transformer, work: GenerationWork) -> BenchRow:
    """Sequences of different lengths, several times as many as slots: how well slots are refilled."""
    lengths, slots = mixed_lengths(work), work.mixed_slots
    requests = [
        Request(prompt=tuple(ids), sampling=Sampling(max_new_tokens=length, temperature=TEMPERATURE))
        for ids, length in zip(prompts_of(work, len(lengths)), lengths, strict=True)
    ]
    with _engine(model, work, slots=slots, max_new_tokens=work.mixed_lengths[1]) as engine:
        found = _run(engine, requests, work.repeats)
        runs, stats = 1 + len(found["seconds"]), engine.stats  # all of them do the same
        steps, rows = stats.decode_steps // runs, stats.slot_steps // runs
    decoded, count = sum(lengths) - len(lengths), len(lengths)
    return _row("redline_mixed", work, count, 1, count) | {
        "slots": slots, "tokens": sum(lengths), **found, "decode_steps": steps,
        "occupancy": decoded / (slots * steps), "row_occupancy": decoded / rows,
    }  # fmt: skip
