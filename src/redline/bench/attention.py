"""`redline bench attention`: kernel attention against flash attention, from short sequences to long ones: time and memory
of a layer's forward and backward, time of a decode step, memory of a sequence, and the length from which it wins.

    path = bench_attention("full", facts, Path("benchmarks"))       # attention_<hardware>_<date>.{json,md}

Every arm runs in its process, in bf16 on a GPU. In training every length has the same number of tokens, so a column that
does not change is linear in the length. On a GPU the times are CUDA events around several runs; decode steps are
captured as a graph, as the engine runs them, so that the host's launches do not count. About a minute on an H200.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.bench.results import BenchRow, grid, head, rows_of, write
from redline.config.recipe import ModelConfig
from redline.errors import Say
from redline.machine.ceilings import time_cpu_s, time_cuda_s
from redline.machine.facts import MachineFacts
from redline.measure.child import device, half
from redline.model.attention import favor, softmax
from redline.model.attention.state import Room, Rows
from redline.model.attention.variants import VARIANTS
from redline.model.transformer import Attention, build_model
from redline.record.units import format_bytes

LABELS = {"flash": "flash attention", "cudnn": "cuDNN's flash attention", "favor": "kernel attention"}
SHOWN = LABELS | {"softmax": "softmax attention in the engine"}


@dataclass(frozen=True, kw_only=True)
class Work:
    lengths: tuple[int, ...]
    tokens: int
    """Tokens in each training pass; at least one sequence."""
    heads: int
    head_size: int
    features: int
    sequences: int
    """Sequences that take a decode step together."""
    runs: int
    """Timed runs; the median counts."""


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
    size: str, facts: MachineFacts, out: Path, *, arms: Sequence[str] = tuple(LABELS), progress: Say
) -> Path:
    """Run the arms and write the results after each; returns the path of the page."""
    work, rows, path = WORK[size], list[BenchRow](), out
    for arm in arms:
        # the engine has one kernel for softmax attention
        for what in ("training", "generation") if arm != "cudnn" else ("training",):
            progress(f"{what} with {LABELS[arm]}")
            rows += rows_of(f"redline.bench.attention:{what}", {"arm": arm, "name": size})
        crossings = crossing_lengths(rows)
        results = {"work": asdict(work), "rows": rows, "crossing_tokens": crossings}
        named = "attention" if size == "full" else f"attention-{size}"
        path = write(out, named, facts, results, page(facts, work, rows, crossings))
    return path


def crossing_lengths(rows: Sequence[BenchRow]) -> dict[str, float | None]:
    """For each comparison, the length from which kernel attention is faster."""
    times: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if "seconds" in row:
            times.setdefault((row["what"], row["arm"]), {})[row["seq_len"]] = row["seconds"]
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


def page(
    facts: MachineFacts, work: Work, rows: Sequence[BenchRow], crossings: Mapping[str, float | None]
) -> list[str]:
    heads = f"{work.heads} heads of {work.head_size}, {work.features} features each"
    lines = head("attention", "Kernel attention", facts, quick=work is WORK["quick"])
    lines += ["", f"{heads}. A layer's attention alone."]
    titles = {
        "training": f"Forward and backward, {work.tokens:,} tokens: ms, and memory beyond the inputs",
        "generation": f"A decode step of {work.sequences} sequences: ms, and memory of a sequence in a layer",
    }
    for what, title in titles.items():
        here = [row for row in rows if row.get("what") == what]
        arms = list(dict.fromkeys(row["arm"] for row in here))
        cells = {(row["arm"], row["seq_len"]): _cell(row) for row in here}
        body = [[f"{n:,}", *(cells.get((arm, n), "failed") for arm in arms)] for n in work.lengths]
        lines += ["", f"## {title}", "", *grid(["tokens", *(SHOWN[arm] for arm in arms)], body)]
    lines += ["", "## From which length kernel attention is faster", ""]
    for name, length in crossings.items():
        lines.append(f"- {name}: {'at no measured length' if length is None else f'{length:,.0f} tokens'}")
    return [*lines, *(f"\nAn arm failed: {row['failed']}" for row in rows if "failed" in row)]


def _cell(row: BenchRow) -> str:
    memory = "" if row["memory_bytes"] is None else f", {format_bytes(row['memory_bytes'])}"
    return f"{1e3 * row['seconds']:.3f}{memory}"


# ---- the arms, each in its process ----

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
STEPS = 10
"""Decode steps in a graph."""


def training(setting: dict[str, str]) -> Iterator[BenchRow]:
    """Forward and backward of one layer's attention, as many tokens at every length."""
    work, arm, on = WORK[setting["name"]], setting["arm"], device()
    shape, dtype = (work.heads, work.head_size), half()
    w = favor.draw(_config(work, "favor"), 0).to(on, dtype)
    for seq_len in work.lengths:
        batch = max(1, work.tokens // seq_len)
        qkv = [torch.randn((batch, seq_len, *shape), device=on, dtype=dtype) for _ in range(3)]
        grad = torch.randn((batch, seq_len, work.heads * work.head_size), device=on, dtype=dtype)
        for x in qkv:
            x.requires_grad_()

        def run(qkv: list[Tensor] = qkv, grad: Tensor = grad) -> None:
            q, k, v = qkv
            y = favor.causal(q, k, v, w) if arm == "favor" else softmax.causal(q, k, v)
            torch.autograd.grad(y, qkv, grad)

        with sdpa_kernel(BACKENDS[arm]) if arm in BACKENDS and on.type == "cuda" else nullcontext():
            seconds = _seconds(run, on, work.runs)
            memory_bytes = _peak_bytes(run, on)
        yield {
            "what": "training", "arm": arm, "seq_len": seq_len, "batch": batch, "seconds": seconds,
            "memory_bytes": memory_bytes,
        }  # fmt: skip


@torch.no_grad()
def generation(setting: dict[str, str]) -> Iterator[BenchRow]:
    """One decode step of one layer for sequences that have so many tokens behind them."""
    work, on = WORK[setting["name"]], device()
    kind = "favor" if setting["arm"] == "favor" else "softmax"
    config = _config(work, kind)
    attn = build_model(config, device=on, seed=0).blocks[0].attn
    for seq_len in work.lengths:
        room = Room(
            slots=work.sequences,
            prompts=work.sequences,
            max_prompt_tokens=seq_len - STEPS,
            max_new_tokens=STEPS,
        )
        before = torch.cuda.memory_allocated() if on.type == "cuda" else 0
        state = VARIANTS[kind]().state(config, None, room, device=on, dtype=half())
        held = torch.cuda.memory_allocated() - before if on.type == "cuda" else 0
        sequence = VARIANTS[kind]().state.sequence_bytes(config, room, half())
        run = _decode(work, attn, state, seq_len, on)
        yield {
            "what": "generation", "arm": kind, "seq_len": seq_len, "batch": work.sequences,
            "seconds": _seconds(run, on, work.runs) / STEPS, "memory_bytes": held // work.sequences or sequence,
        }  # fmt: skip
        del state, run


def _decode(work: Work, attn: Attention, state: Any, seq_len: int, on: torch.device) -> Callable[[], None]:
    """STEPS steps for all sequences; on a GPU as one graph."""

    def integers(*values: int) -> Tensor:
        return torch.tensor([*values, 0], dtype=torch.int32, device=on)

    n = work.sequences
    everyone = torch.arange(n, dtype=torch.int32, device=on)
    rows = Rows(everyone, integers(*range(n)), integers(*[seq_len - STEPS] * n), integers(*[1] * n))
    qkv = torch.randn((n, 3 * work.heads, work.head_size), device=on, dtype=half())

    def run() -> None:
        for _ in range(STEPS):
            state.step(0, attn, qkv, rows)

    if on.type == "cpu":
        return run
    run()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _config(work: Work, kind: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=64, num_layers=1, hidden_size=work.heads * work.head_size, num_heads=work.heads, ffn_size=64,
        context_length=max(work.lengths), attention=kind, features=work.features,
    )  # fmt: skip


def _seconds(run: Callable[[], object], on: torch.device, runs: int) -> float:
    """The median of several runs, after one that does not count."""
    run()
    clock = time_cuda_s if on.type == "cuda" else time_cpu_s
    return median(clock(lambda _: run(), 1)[0] for _ in range(runs))


def _peak_bytes(run: Callable[[], object], on: torch.device) -> int | None:
    """Memory beyond the inputs; a CPU's is not known."""
    if on.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
