"""The arms of `redline bench attention`, each in its process: attention alone, forward and backward, and one decode step
for a batch of sequences, over a range of lengths.

    for row in training({"arm": "favor", ...}): ...
    for row in generation({"arm": "favor", ...}): ...

On a GPU the times are CUDA events around several runs; decode steps are captured as a graph, as the engine runs them, so
that the host's launches do not count. On a CPU the clock is the host's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.bench.attention import Work
from redline.bench.results import BenchRow
from redline.config.load import build
from redline.config.recipe import ModelConfig
from redline.model.attention import favor, softmax
from redline.model.attention.state import Room, Rows
from redline.model.attention.variants import VARIANTS
from redline.model.transformer import Attention, build_model

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
STEPS = 10
"""Decode steps in a graph."""


def training(setting: dict[str, Any]) -> Iterator[BenchRow]:
    """Forward and backward of one layer's attention, as many tokens at every length."""
    work, arm, device = build(Work, setting["work"], "work"), setting["arm"], _device()
    shape, dtype = (work.heads, work.head_size), _dtype(device)
    w = favor.draw(_config(work, "favor"), 0).to(device, dtype)
    for seq_len in work.lengths:
        batch = max(1, work.tokens // seq_len)
        qkv = [torch.randn((batch, seq_len, *shape), device=device, dtype=dtype) for _ in range(3)]
        grad = torch.randn((batch, seq_len, work.heads * work.head_size), device=device, dtype=dtype)
        for x in qkv:
            x.requires_grad_()

        def run(qkv: list[Tensor] = qkv, grad: Tensor = grad) -> None:
            q, k, v = qkv
            y = favor.causal(q, k, v, w) if arm == "favor" else softmax.causal(q, k, v)
            torch.autograd.grad(y, qkv, grad)

        with sdpa_kernel(BACKENDS[arm]) if arm in BACKENDS and device.type == "cuda" else nullcontext():
            seconds = _seconds(run, device, work.runs)
            memory_bytes = _peak_bytes(run, device)
        yield {
            "what": "training", "arm": arm, "seq_len": seq_len, "batch": batch, "seconds": seconds,
            "memory_bytes": memory_bytes,
        }  # fmt: skip


@torch.no_grad()
def generation(setting: dict[str, Any]) -> Iterator[BenchRow]:
    """One decode step of one layer for sequences that have so many tokens behind them."""
    work, device = build(Work, setting["work"], "work"), _device()
    kind = "favor" if setting["arm"] == "favor" else "softmax"
    config = _config(work, kind)
    attn = build_model(config, device=device, seed=0).blocks[0].attn
    for seq_len in work.lengths:
        room = Room(
            slots=work.sequences,
            prompts=work.sequences,
            max_prompt_tokens=seq_len - STEPS,
            max_new_tokens=STEPS,
        )
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        state = VARIANTS[kind].state(config, None, room, device=device, dtype=_dtype(device))
        held = torch.cuda.memory_allocated() - before if device.type == "cuda" else 0
        sequence = VARIANTS[kind].state.sequence_bytes(config, room, _dtype(device))
        run = _decode(work, attn, state, seq_len, device)
        yield {
            "what": "generation", "arm": kind, "seq_len": seq_len, "batch": work.sequences,
            "seconds": _seconds(run, device, work.runs) / STEPS, "memory_bytes": held // work.sequences or sequence,
        }  # fmt: skip
        del state, run


def _decode(
    work: Work, attn: Attention, state: Any, seq_len: int, device: torch.device
) -> Callable[[], None]:
    """STEPS steps for all sequences; on a GPU as one graph."""

    def integers(*values: int) -> Tensor:
        return torch.tensor([*values, 0], dtype=torch.int32, device=device)

    n = work.sequences
    everyone = torch.arange(n, dtype=torch.int32, device=device)
    rows = Rows(everyone, integers(*range(n)), integers(*[seq_len - STEPS] * n), integers(*[1] * n))
    qkv = torch.randn((n, 3 * work.heads, work.head_size), device=device, dtype=_dtype(device))

    def run() -> None:
        for _ in range(STEPS):
            state.step(0, attn, qkv, rows)

    if device.type == "cpu":
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


def _seconds(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """The median of several runs, after one that does not count."""
    run()
    found = []
    for _ in range(runs):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started_s = time.perf_counter()
            run()
            found.append(time.perf_counter() - started_s)
    return median(found)


def _peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Memory beyond the inputs; a CPU's is not known."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
