"""`redline bench generate`: our engine against `transformers` on the same model and the same work, in one run.

    path = bench_generate("full", facts, Path("benchmarks"), ceilings=ceilings, ...)  # generate_<hardware>_<date>.{json,md}

Each side runs in its own process (generate_arms.py) and yields a row per measurement, so a crash keeps what was
measured before it. A row's floor is the least time the machine would need: read the weights once a step and the keys
and values of every token at the measured copy bandwidth, then multiply at the measured rate. Left out, so that it
stays a lower bound: logits, activations, writes, sampling.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from redline.bench.results import MEASURED, SMOLLM2_360M, TINY, Bench, BenchRow, run_arms, shape
from redline.config.recipe import ModelConfig
from redline.machine.store import Ceilings
from redline.plan.arithmetic import BYTES
from redline.plan.roofline import generation_floor_s
from redline.record.units import format_duration

TEMPERATURE = 0.8
"""Temperature of all sampled rows; no top-k or top-p."""


@dataclass(frozen=True, kw_only=True)
class GenerationWork:
    """The model and the work."""

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
"""Sequences per slot when lengths are mixed; with 4, waiting for the last would keep any engine below 77 %."""


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


# ---- the floor ----


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


# ---- the page ----

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
    arm="redline.bench.generate_arms:{arm}",
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
