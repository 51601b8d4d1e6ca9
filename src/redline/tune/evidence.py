"""What the profiler shows of a piece of work: operations by name, dtypes of matrix products, kernels that ran on
a GPU; and the result of a check.

    with profiled() as seen:
        step()
    seen.operations["aten::mm"], seen.products, seen.kernels
    checked("optimiser kernels", seen.operations["aten::_fused_adamw_"] > 0, "what was seen")

Read from the profiler's trace, which has input types even of compiled code (a dispatch mode would keep the
compiler from running). It costs a slow step: for proofs, not for measuring.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

DTYPES = {
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
"""Matrix products of layers. Explicit attention multiplies batches (`bmm`), always in fp32."""
READ = "aten::_local_scalar_dense"
"""A number that the host reads out of a tensor."""
EMBEDDING = "aten::embedding"
OPTIMIZER = "Optimizer.step#"
"""How torch marks the time of an optimiser's step."""
Status = Literal["passed", "failed", "not applicable", "not checked"]
"""`not checked`: it concerns this plan but cannot be seen on this machine; neither a failure nor a proof."""


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    status: Status
    evidence: str


def checked(name: str, holds: bool, evidence: str) -> Check:
    return Check(name=name, status="passed" if holds else "failed", evidence=evidence)


def absent(name: str, why: str) -> Check:
    return Check(name=name, status="not applicable", evidence=why)


def unseen(name: str, why: str) -> Check:
    return Check(name=name, status="not checked", evidence=why)


@dataclass
class Trace:
    operations: Counter[str] = field(default_factory=Counter)
    """How often each ran on the host's side."""
    products: dict[str, float] = field(default_factory=dict)
    """Share of the multiplications of the layers' matrix products by the dtype of their inputs."""
    kernels: Counter[str] = field(default_factory=Counter)
    """On the GPU; empty on a CPU."""
    embedded: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the tokens that were looked up, one for each pass of training."""
    reads: int = 0
    """Numbers that the host read outside optimiser steps; inside them torch reads many on a CPU."""


ATTENTION_KINDS = {
    "flash": (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "cudnn": ("aten::_scaled_dot_product_cudnn_attention",),
    "efficient": ("aten::_scaled_dot_product_efficient_attention",),
    # for packed rows on a GPU in half precision: one operation per block
    "short": ("_ShortAttention",),
    "varlen": ("torch_attn::_varlen_attn",),
    # our kernel, and an operation that nothing but its form in PyTorch uses: one per block
    "favor": ("redline::favor", "aten::_cummax_helper"),
}


def attention_ran(seen: Trace) -> dict[str, int]:
    """How often each kernel's operation ran."""
    counts = {name: sum(seen.operations[o] for o in names) for name, names in ATTENTION_KINDS.items()}
    return {name: count for name, count in counts.items() if count}


def kernel_attention(name: str, kind: str, seen: Trace, blocks: int, *, compiled: bool) -> Check:
    """Whether every block computed the model's kernel attention, and none softmax attention."""
    ran = attention_ran(seen).get(kind, 0)
    softmax = seen.operations["aten::scaled_dot_product_attention"]
    evidence = f"model says {kind}; in one pass of {blocks} blocks it ran {ran} times, softmax attention {softmax} times"
    if compiled and not ran and not softmax:
        return unseen(name, f"{evidence}; compiled code does not name it")
    return checked(name, ran >= blocks and not softmax, evidence)


@contextmanager
def profiled() -> Iterator[Trace]:
    """Filled when the `with` block ends."""
    seen = Trace()
    # torch 2.13 says on standard error that it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities, record_shapes=True) as profiler:
        yield seen
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    _take_in(seen, events)


def _take_in(seen: Trace, events: list[dict[str, Any]]) -> None:
    work: Counter[str] = Counter()
    steps = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(OPTIMIZER)
    ]
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "kernel":
            seen.kernels[name] += 1
        elif kind in ("cpu_op", "cuda_runtime", "cuda_driver"):
            seen.operations[name] += 1
            if name in PRODUCTS:
                dtype, multiplications = _product(name, event["args"])
                work[dtype] += multiplications
            elif name == EMBEDDING:
                seen.embedded.append(tuple(event["args"]["Input Dims"][1]))
            elif name == READ:
                seen.reads += not any(begin <= event["ts"] <= end for begin, end in steps)
    seen.products = {dtype: amount / work.total() for dtype, amount in work.items()} if work.total() else {}


def _product(name: str, arguments: dict[str, Any]) -> tuple[str, int]:
    """The dtype of a product's inputs and its number of multiplications."""
    given = zip(arguments["Input Dims"], arguments["Input type"], strict=True)
    matrices = [(dims, kind) for dims, kind in given if len(dims) == 2 and kind in DTYPES]
    # addmm may have a matrix to add before the two, a scaled product has scales after them
    operands = matrices[-2:] if name == "aten::addmm" else matrices[:2]
    if len(operands) < 2:
        return "other", 0
    ((rows, inner), kind), ((_, columns), _) = operands
    return DTYPES[kind], rows * inner * columns
