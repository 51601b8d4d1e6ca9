"""A Triton kernel for a decode step of kernel attention; `favor.Features.step` says in PyTorch what it computes.

Rotation, the sums' update in their slot and what the queries read of them are one kernel: a step reads and writes each
sum once, which is all it has to do. Exponents are in base 2 here and natural in the slots.

Shapes as in `favor`. The query heads of a key/value head make a tile of at least 16 rows, the least that the tensor
cores take.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.model.attention.favor_kernels import directions
from redline.model.attention.state import Rows

if TYPE_CHECKING:
    from redline.model.attention.favor import Features

BLOCK = 32
"""Features at a time."""


def step(state: "Features", layer: int, w_KMC: Tensor, qkv_BHC: Tensor, rows: Rows) -> Tensor:
    """One token more in each row's slot, rotated, and what its queries then read; in place."""
    (K, M, C), (B, heads, _) = w_KMC.shape, qkv_BHC.shape
    q_heads = heads - 2 * K
    out = torch.empty((B, q_heads * C), dtype=qkv_BHC.dtype, device=qkv_BHC.device)
    cos, sin = state.rope or (qkv_BHC, qkv_BHC)
    _step[(B, K)](
        qkv_BHC, w_KMC, out, *(part[layer] for part in state.slots), rows.slot_B, rows.prompt_len_N, rows.count_N,
        cos, sin, C**-0.25, Q_HEADS=q_heads, K=K, M=M, C=C, BM=BLOCK,
        GROUP=max(16, triton.next_power_of_2(q_heads // K)), ROPE=state.rope is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _turned(ptr, rows, inside, cos, sin, C: tl.constexpr, ROPE: tl.constexpr):
    """Heads, rotated, in the dtype they came in."""
    c = tl.arange(0, C)
    x = tl.load(ptr + rows + c[None, :], mask=inside, other=0.0)
    if ROPE:
        other = tl.load(ptr + rows + ((c + C // 2) % C)[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]).to(x.dtype)
    return x


@triton.jit
def _step(
    qkv_ptr, w_ptr, out_ptr, mix_ptr, total_ptr, top_ptr, slot_ptr, prompt_len_ptr, count_ptr, cos_ptr, sin_ptr,
    SCALE, Q_HEADS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    GROUP: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(prompt_len_ptr + slot) + tl.load(count_ptr + slot) - 1
    group: tl.constexpr = Q_HEADS // K
    g, c, i = tl.arange(0, GROUP), tl.arange(0, C), tl.arange(0, BM)
    cos, sin = c.to(tl.float32), c.to(tl.float32)
    if ROPE:
        cos = tl.load(cos_ptr + position * C + c)
        sin = tl.load(sin_ptr + position * C + c)
        sin = tl.where(c < C // 2, -sin, sin)
    base = qkv_ptr + row * (Q_HEADS + 2 * K) * C
    q = _turned(base, ((head * group + g) * C)[:, None], (g < group)[:, None], cos, sin, C, ROPE)
    # The key once for each row of a tile: tensor cores cannot multiply a single row.
    k = _turned(base + (Q_HEADS + head) * C, (g * 0)[:, None], (g >= 0)[:, None], cos, sin, C, ROPE)
    v = tl.load(base + (Q_HEADS + K + head) * C + c).to(tl.float32)
    scale = SCALE * 1.4426950408889634
    wide = k.to(tl.float32)
    square = tl.sum(wide * wide, axis=1) * (0.5 * SCALE * scale)
    at = (slot * K + head) * M + i
    shift = tl.full((GROUP,), -float("inf"), tl.float32)
    for block in range(M // BM):
        w = directions(w_ptr, head, block, M, C, BM)
        a = tl.dot(k, tl.trans(w), input_precision="ieee") * scale - square[:, None]
        top = tl.maximum(tl.load(top_ptr + at + block * BM) * 1.4426950408889634, tl.max(a, axis=0))
        b = tl.dot(q, tl.trans(w), input_precision="ieee") * scale + top[None, :]
        shift = tl.maximum(shift, tl.max(b, axis=1))
    y, total = tl.zeros((GROUP, C), tl.float32), tl.zeros((GROUP,), tl.float32)
    for block in range(M // BM):
        w, here = directions(w_ptr, head, block, M, C, BM), at + block * BM
        a = tl.max(tl.dot(k, tl.trans(w), input_precision="ieee") * scale - square[:, None], axis=0)
        before = tl.load(top_ptr + here) * 1.4426950408889634
        top = tl.maximum(before, a)
        fade, phi_k = tl.exp2(before - top), tl.exp2(a - top)
        mix = tl.load(mix_ptr + here[:, None] * C + c[None, :]) * fade[:, None] + phi_k[:, None] * v[None, :]
        count = tl.load(total_ptr + here) * fade + phi_k
        tl.store(mix_ptr + here[:, None] * C + c[None, :], mix)
        tl.store(total_ptr + here, count)
        tl.store(top_ptr + here, top * 0.6931471805599453)
        b = tl.dot(q, tl.trans(w), input_precision="ieee") * scale + top[None, :]
        phi_q = tl.exp2(b - shift[:, None])
        total += tl.sum(phi_q * count[None, :], axis=1)
        y += tl.dot(phi_q, mix, input_precision="ieee")
    out_at = out_ptr + row * Q_HEADS * C + ((head * group + g) * C)[:, None] + c[None, :]
    tl.store(out_at, (y / total[:, None]).to(out_ptr.dtype.element_ty), mask=(g < group)[:, None])
