"""`redline bench attention`: kernel attention beside flash attention, from short sequences to long ones: time and memory
of a layer's forward and backward, time of a decode step, memory of a sequence, and the length from which it wins. No
torch here.

    path = bench_attention("full", facts, Path("benchmarks"))       # attention_<hardware>_<date>.{json,md}

Every arm runs in its process (attention_arms.py), in bf16 on a GPU. In training every length has the same number of
tokens, so a column that does not change is linear in the length. About a minute on an H200.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from redline.bench.results import BenchRow, head, machine_title, rows_of, table, write
from redline.machine.facts import MachineFacts
from redline.record.units import format_bytes

LABELS = {"flash": "flash attention", "cudnn": "cuDNN's flash attention", "favor": "kernel attention"}
SHOWN = LABELS | {"softmax": "softmax attention in the engine"}


@dataclass(frozen=True, kw_only=True)
class Work:
    lengths: tuple[int, ...]
    tokens: int
    """In each training pass; at least one sequence."""
    heads: int
    head_size: int
    features: int
    sequences: int
    """That take a decode step together."""
    runs: int
    """Timed; the median counts."""


WORK = {
    "full": Work(
        lengths=tuple(2**n for n in range(9, 17)), tokens=65_536, heads=12, head_size=64, features=256,
        sequences=16, runs=5,
    ),
    "quick": Work(
        lengths=(32, 64, 128), tokens=128, heads=2, head_size=16, features=32, sequences=2, runs=1
    ),
}  # fmt: skip
"""Heads like those of a 124M model."""


def bench_attention(
    size: str,
    facts: MachineFacts,
    out: Path,
    *,
    arms: Sequence[str] = tuple(LABELS),
    progress: Callable[[str], None],
) -> Path:
    work, rows = WORK[size], list[BenchRow]()
    for arm in arms:
        progress(f"training with {LABELS[arm]}")
        setting = {"arm": arm, "work": asdict(work)}
        rows += rows_of("redline.bench.attention_arms:training", setting)
        if arm != "cudnn":  # the engine has one kernel for softmax attention
            progress(f"generation with {LABELS[arm]}")
            rows += rows_of("redline.bench.attention_arms:generation", setting)
    crossings = crossing_lengths(rows)
    results = {"work": asdict(work), "rows": rows, "crossing_tokens": crossings}
    return write(out, "attention", facts, results, _page(work, rows, crossings, facts, quick=size == "quick"))


def crossing_lengths(rows: Sequence[BenchRow]) -> dict[str, float | None]:
    """Of each comparison the length from which kernel attention is faster."""
    times = _times(rows)
    return {
        f"{what} against {arm}": crossing(times[what, arm], times[what, "favor"])
        for what, arm in times
        if arm != "favor" and (what, "favor") in times
    }


def crossing(theirs: Mapping[int, float], ours: Mapping[int, float]) -> float | None:
    """The length from which ours stays faster, interpolated by powers; None: at no measured length."""
    lengths = sorted(theirs.keys() & ours.keys())
    gains = [math.log(theirs[n] / ours[n]) for n in lengths]
    slower = [i for i, gain in enumerate(gains) if gain <= 0]
    if not lengths or (slower and slower[-1] == len(lengths) - 1):
        return None
    if not slower:
        return float(lengths[0])
    at = slower[-1]
    share = -gains[at] / (gains[at + 1] - gains[at])
    return float(lengths[at] * (lengths[at + 1] / lengths[at]) ** share)


def _times(rows: Sequence[BenchRow]) -> dict[tuple[str, str], dict[int, float]]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if "seconds" in row:
            found.setdefault((row["what"], row["arm"]), {})[row["seq_len"]] = row["seconds"]
    return found


def _page(
    work: Work,
    rows: Sequence[BenchRow],
    crossings: Mapping[str, float | None],
    facts: MachineFacts,
    *,
    quick: bool,
) -> list[str]:
    lines = head("attention", f"Kernel attention on {machine_title(facts)}", facts, quick=quick)
    lines += [
        "",
        f"{work.heads} heads of {work.head_size}, {work.features} features each. A layer's attention alone.",
    ]
    for what, title in (
        ("training", f"Forward and backward, {work.tokens:,} tokens: ms, and memory beyond the inputs"),
        (
            "generation",
            f"A decode step of {work.sequences} sequences: ms, and memory of a sequence in a layer",
        ),
    ):
        here = [row for row in rows if row.get("what") == what]
        arms = list(dict.fromkeys(row["arm"] for row in here))
        cells = {(row["arm"], row["seq_len"]): _cell(row) for row in here}
        body = [[f"{n:,}", *(cells.get((arm, n), "failed") for arm in arms)] for n in work.lengths]
        lines += ["", f"## {title}", "", *table(["tokens", *(SHOWN[arm] for arm in arms)], body)]
    lines += ["", "## From which length kernel attention is faster", ""]
    lines += [
        f"- {name}: {'not up to there' if n is None else f'{n:,.0f} tokens'}" for name, n in crossings.items()
    ]
    return [*lines, *(f"\nAn arm failed: {row['failed']}" for row in rows if "failed" in row)]


def _cell(row: BenchRow) -> str:
    memory = "" if row["memory_bytes"] is None else f", {format_bytes(row['memory_bytes'])}"
    return f"{1e3 * row['seconds']:.3f}{memory}"
