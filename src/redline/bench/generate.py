"""`redline bench generate`: our engine beside `transformers` on the same model and the same work, in one run.

    path = bench_generate("full", ceilings, facts, Path("benchmarks"))       # generate_<hardware>_<date>.{json,md}

Each side runs in its own process (generate_arms.py) and yields a row per measurement, so a crash keeps what was
measured before it. A row's floor is the least time the machine would need: read the weights once a step and the keys
and values of every token at the measured copy bandwidth, then multiply at the measured rate. Left out, so that it
stays a lower bound: logits, activations, writes, sampling.
"""

import heapq
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from redline.bench.results import SMOLLM2_360M, TINY, BenchRow, head, rows_of, shape, spread, table, write
from redline.config.recipe import ModelConfig
from redline.errors import Say
from redline.machine.facts import MachineFacts
from redline.machine.store import Ceilings
from redline.plan.arithmetic import BYTES
from redline.plan.roofline import generation_floor_s
from redline.record.units import format_bytes, format_duration

TEMPERATURE = 0.8
"""Of all sampled rows; no top-k or top-p."""


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
    """Of a prompt, for our engine."""
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


def bench_generate(
    name: str, ceilings: Ceilings, facts: MachineFacts, out: Path, *, arms: Sequence[str], progress: Say
) -> Path:
    """Run the arms and write the results after each; returns the path of the page."""
    work, rows, path = WORKS[name], list[BenchRow](), out
    what = "generate" if name == "full" else f"generate-{name}"
    for arm in arms:
        started_s = time.monotonic()
        for row in rows_of(f"redline.bench.generate_arms:{arm}", {"name": name}):
            rows.append(_summary({"row": arm, **row}, work, ceilings))
            progress(_brief(rows[-1]))
        progress(f"{arm} took {time.monotonic() - started_s:.0f} s in all")
        results = {"ceilings": asdict(ceilings), "setting": {"name": name, **asdict(work)}, "rows": rows}
        path = write(out, what, facts, results, page(facts, work, rows))
    return path


# ---- the floor ----


def _floors(row: BenchRow, work: GenerationWork, ceilings: Ceilings) -> dict[str, float]:
    cuda = ceilings.device != "cpu"
    dtype = "bf16" if cuda else "fp32"
    rate = (ceilings.matmul_tflops("bf16") or 0.0) * 1e12 if cuda else ceilings.cpu_matmul_gflops * 1e9
    bandwidth = ceilings.copy_bytes_per_s if cuda else ceilings.cpu_copy_bytes_per_s
    if not bandwidth or not rate:
        return {}
    lengths = mixed_lengths(work) if row["row"] == "redline_mixed" else [work.new_tokens] * row["sequences"]
    found: dict[str, float] = {}
    for name, shared in (("floor", False), ("floor_shared", True)):
        seconds = generation_floor_s(
            work.model, prompts=row["prompts"], prompt_tokens=work.prompt_tokens, new_tokens=lengths,
            slots=row["slots"], bytes_per_value=BYTES[dtype], bytes_per_s=bandwidth, flops_per_s=rate,
            shared=shared,
        )  # fmt: skip
        found |= {f"{name}_s": seconds, f"share_of_{name}": seconds / median(row["seconds"])}
    return found


def _summary(row: BenchRow, work: GenerationWork, ceilings: Ceilings) -> BenchRow:
    """The row with its speed and floor."""
    if "seconds" not in row:
        return row
    row = row | spread([row["tokens"] / seconds for seconds in row["seconds"]], "tokens_per_s")
    if row["row"] == "redline_mixed":
        row |= {"most_occupancy": most_occupancy(work)}
    return row | (_floors(row, work, ceilings) if row["row"].startswith("redline") else {})


# ---- the page ----

LABELS = {
    "generate": "transformers `generate`",
    "continuous": "transformers continuous batching",
    "redline": "redline",
    "redline_mixed": "redline, mixed lengths",
    "transformers": "transformers",
}


def _label(row: BenchRow) -> str:
    if row["row"] in ("generate", "continuous"):
        return f"{LABELS[row['row']]} {row['prompts']}x{row['samples']}"
    if "prompts" in row and row["row"].startswith("redline"):
        shared = "distinct prompts" if row["prompts"] == row["sequences"] else f"{row['prompts']} prompts"
        return f"{LABELS[row['row']]}, {shared}"
    return LABELS[row["row"]]


def _brief(row: BenchRow) -> str:
    if "failed" in row:
        return f"{_label(row)}: failed: {row['failed']}"
    if "tokens_per_s" in row:
        at_once = row.get("slots", row["sequences"])
        return f"{_label(row)}, at most {at_once:,} at a time: {row['tokens_per_s']:,.0f} tokens/s"
    return _finding(row) or _label(row)


def page(facts: MachineFacts, work: GenerationWork, rows: Sequence[BenchRow]) -> list[str]:
    """Markdown: speeds, then the small findings."""
    batch = work.batches[HEADLINE - 1]
    usual = (r for r in rows if r["row"] == "generate" and (r["prompts"], r["samples"]) == batch)
    reference = next((r.get("tokens_per_s") for r in usual), None)
    columns = (
        "arm", "sequences", "tokens/s", "interval", "runs", f"against {batch[0]}x{batch[1]}",
        "share of the floor", "peak memory", "first run",
    )  # fmt: skip
    return [
        *head("generate", "Generation", facts, quick=work is WORKS["quick"]),
        f"{shape(work.model)}; prompts of {work.prompt_tokens} tokens, {work.new_tokens} new tokens each,"
        f" temperature {TEMPERATURE}. Median of the timed runs; interval: slowest to fastest.",
        "Floor: weights once a step, keys and values once a token, at the measured copy bandwidth, and the"
        " multiplications at the measured rate; in brackets with the keys and values of a prompt read once for all"
        " of its samples.",
        "",
        *table(columns, [_cells(r, reference) for r in rows if "tokens_per_s" in r or "failed" in r]),
        "",
        *_compared(rows),
        *(found for row in rows if (found := _finding(row)) is not None),
    ]


def _cells(row: BenchRow, reference: float | None) -> list[str]:
    if "failed" in row:
        return [_label(row), str(row.get("sequences", "")), "failed", row["failed"]]
    share = ""
    if "share_of_floor" in row:
        share = f"{row['share_of_floor']:.0%} ({row['share_of_floor_shared']:.0%})"
    return [
        _label(row),
        f"{row['sequences']:,}" + (f" in {row['slots']:,} slots" if row["row"] == "redline_mixed" else ""),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['low']:,.0f} – {row['high']:,.0f}",
        str(len(row["seconds"])),
        f"{row['tokens_per_s'] / reference:.2f}x" if reference else "–",
        share,
        format_bytes(row["memory_bytes"]),
        format_duration(row["first_run_s"]),
    ]


def _compared(rows: Sequence[BenchRow]) -> list[str]:
    """The best of each side in one sentence."""

    def best(name: str) -> BenchRow | None:
        timed = [row for row in rows if row["row"] == name and "tokens_per_s" in row]
        return max(timed, key=lambda row: row["tokens_per_s"], default=None)

    theirs, ours = best("generate"), best("redline")
    if theirs is None or ours is None:
        return []
    return [
        f"Best of transformers: {theirs['prompts']}x{theirs['samples']},"
        f" {theirs['tokens_per_s']:,.0f} tokens/s. Best of redline: {ours['sequences']:,} sequences,"
        f" {ours['tokens_per_s']:,.0f} tokens/s, {ours['tokens_per_s'] / theirs['tokens_per_s']:.1f} times as"
        " many."
    ]


def _finding(row: BenchRow) -> str | None:
    """What a row says besides its speed, as a sentence."""
    if "failed" in row:
        return None
    if row["row"] == "redline_mixed":
        return (
            f"Mixed lengths, {MIXED_WAVES} sequences a slot: slot occupancy {row['occupancy']:.1%} (decoded"
            f" tokens over {row['slots']:,} slots x {row['decode_steps']:,} steps;"
            f" {row['most_occupancy']:.1%} is the most that this order of lengths allows);"
            f" {row['row_occupancy']:.1%} of the rows computed were of use."
        )
    return None
