"""A Triton kernel for attention over short packed sequences, with the rotation, forward and backward.

    y = attend(qkv_THC, cos, sin, bounds, q_heads=15, longest=64)     # causal within each sequence, (T, q_heads * C)

An update on some 1,500 tokens in sequences of 45 is bound by the number of its kernels: torch's attention for
sequences of several lengths took 2.5 of its 16 ms on an H200 (blocks of 128 for 45 tokens, six kernels for
both directions), and splitting, rotating and joining the heads took as long again. Here a sequence and a
key/value head are one program: everything fits into one block, so nothing but its input is kept for the
backward. CUDA and half precision only; longer sequences take torch's kernel (`packed`).

Shapes: T tokens of a row, H query heads and twice the key/value heads, C head width, L the block that holds a
sequence, S sequences.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from redline.model.kernels import shared_bytes
from redline.plan.arithmetic import SHORT_ROW

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

WIDTHS = (32, 64, 128)


def fits(device: torch.device, *, longest: int, head_size: int) -> bool:
    """Whether the kernel takes sequences of this length on this GPU."""
    if triton is None or longest > SHORT_ROW or head_size not in WIDTHS:
        return False
    return backward_bytes(_block(longest), head_size) <= shared_bytes(device)


def backward_bytes(L: int, C: int) -> int:
    """Shared memory that the backward takes at most, from compute capability 8.0 on (tests/kernels compiles it)."""
    return (16 * C + 2 * L) * L


def _block(longest: int) -> int:
    return max(16, triton.next_power_of_2(longest))


def attend(
    qkv_THC: Tensor, cos_TC: Tensor, sin_TC: Tensor, bounds_S: Tensor, *, q_heads: int, longest: int
) -> Tensor:
    """Rotate queries and keys by the angles of their tokens, and attend causally within each sequence."""
    return _ShortAttention.apply(qkv_THC, cos_TC, sin_TC, bounds_S, q_heads, longest)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor, q_heads: int, longest: int
    ) -> Tensor:
        T, heads, width = qkv.shape
        y = torch.empty((T, q_heads * width), dtype=qkv.dtype, device=qkv.device)
        kv_heads, block = (heads - q_heads) // 2, _block(longest)
        ctx.save_for_backward(qkv, cos, sin, bounds)
        ctx.grid = (len(bounds) - 1, kv_heads)
        ctx.sizes = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "C": width, "L": block}
        ctx.warps = 4 if block <= 64 else 8
        _attend[ctx.grid](qkv, cos, sin, bounds, y, width**-0.5, **ctx.sizes, num_warps=ctx.warps)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, bounds = ctx.saved_tensors
        dqkv, scale = torch.empty_like(qkv), qkv.shape[2] ** -0.5
        _attend_backward[ctx.grid](
            qkv, cos, sin, bounds, dy.contiguous(), dqkv, scale, **ctx.sizes, num_warps=ctx.warps
        )
        return dqkv, None, None, None, None, None


if triton is not None:

    @triton.jit
    def _turned(row_ptrs, half, cos, sin, inside, C: tl.constexpr):
        """A head's two halves, rotated, in the dtype they came in."""
        a = tl.load(row_ptrs + half[None, :], mask=inside, other=0.0)
        b = tl.load(row_ptrs + C // 2 + half[None, :], mask=inside, other=0.0)
        x, y = a.to(tl.float32), b.to(tl.float32)
        return (x * cos - y * sin).to(a.dtype), (y * cos + x * sin).to(a.dtype)

    @triton.jit
    def _store_turned_back(row_ptrs, half, d1, d2, cos, sin, inside, C: tl.constexpr):
        """The gradient of a head before its rotation, from that of its rotated halves."""
        dtype = row_ptrs.dtype.element_ty
        tl.store(row_ptrs + half[None, :], (d1 * cos + d2 * sin).to(dtype), mask=inside)
        tl.store(row_ptrs + C // 2 + half[None, :], (d2 * cos - d1 * sin).to(dtype), mask=inside)

    @triton.jit
    def _weights(q1, q2, k1, k2, visible, scale):
        """Softmax of the scores, in fp32."""
        scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
        scores = tl.where(visible, scores, -float("inf"))
        p = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        return p / tl.sum(p, axis=1)[:, None]

    @triton.jit
    def _attend(
        qkv_ptr, cos_ptr, sin_ptr, bounds_ptr, y_ptr, scale,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    ):  # fmt: skip
        sequence, head = tl.program_id(0), tl.program_id(1)
        start = tl.load(bounds_ptr + sequence)
        length = tl.load(bounds_ptr + sequence + 1) - start
        t, c, half = tl.arange(0, L), tl.arange(0, C), tl.arange(0, C // 2)
        inside = (t < length)[:, None]
        rows = (start + t).to(tl.int64)[:, None]
        cos = tl.load(cos_ptr + rows * C + half[None, :], mask=inside, other=0.0)
        sin = tl.load(sin_ptr + rows * C + half[None, :], mask=inside, other=0.0)
        base = qkv_ptr + rows * ((Q_HEADS + 2 * KV_HEADS) * C)
        k1, k2 = _turned(base + (Q_HEADS + head) * C, half, cos, sin, inside, C)
        v = tl.load(base + (Q_HEADS + KV_HEADS + head) * C + c[None, :], mask=inside, other=0.0)
        visible = (t[:, None] >= t[None, :]) & (t < length)[None, :]
        group: tl.constexpr = Q_HEADS // KV_HEADS
        for g in range(group):
            q_head = head * group + g
            q1, q2 = _turned(base + q_head * C, half, cos, sin, inside, C)
            y = tl.dot(_weights(q1, q2, k1, k2, visible, scale).to(v.dtype), v)
            tl.store(y_ptr + rows * (Q_HEADS * C) + q_head * C + c[None, :], y.to(v.dtype), mask=inside)

    @triton.jit
    def _attend_backward(
        qkv_ptr, cos_ptr, sin_ptr, bounds_ptr, dy_ptr, dqkv_ptr, scale,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    ):  # fmt: skip
        sequence, head = tl.program_id(0), tl.program_id(1)
        start = tl.load(bounds_ptr + sequence)
        length = tl.load(bounds_ptr + sequence + 1) - start
        t, c, half = tl.arange(0, L), tl.arange(0, C), tl.arange(0, C // 2)
        inside = (t < length)[:, None]
        rows = (start + t).to(tl.int64)[:, None]
        cos = tl.load(cos_ptr + rows * C + half[None, :], mask=inside, other=0.0)
        sin = tl.load(sin_ptr + rows * C + half[None, :], mask=inside, other=0.0)
        stride: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * C
        base, out = qkv_ptr + rows * stride, dqkv_ptr + rows * stride
        k1, k2 = _turned(base + (Q_HEADS + head) * C, half, cos, sin, inside, C)
        v = tl.load(base + (Q_HEADS + KV_HEADS + head) * C + c[None, :], mask=inside, other=0.0)
        visible = (t[:, None] >= t[None, :]) & (t < length)[None, :]
        dk1, dk2 = tl.zeros((L, C // 2), tl.float32), tl.zeros((L, C // 2), tl.float32)
        dv = tl.zeros((L, C), tl.float32)
        group: tl.constexpr = Q_HEADS // KV_HEADS
        for g in range(group):
            q_head = head * group + g
            q1, q2 = _turned(base + q_head * C, half, cos, sin, inside, C)
            dy = tl.load(dy_ptr + rows * (Q_HEADS * C) + q_head * C + c[None, :], mask=inside, other=0.0)
            p = _weights(q1, q2, k1, k2, visible, scale)
            dv += tl.dot(tl.trans(p.to(v.dtype)), dy)
            dp = tl.dot(dy, tl.trans(v))
            ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None]) * scale).to(v.dtype)
            _store_turned_back(out + q_head * C, half, tl.dot(ds, k1), tl.dot(ds, k2), cos, sin, inside, C)
            turned = tl.trans(ds)
            dk1 += tl.dot(turned, q1)
            dk2 += tl.dot(turned, q2)
        _store_turned_back(out + (Q_HEADS + head) * C, half, dk1, dk2, cos, sin, inside, C)
        tl.store(out + (Q_HEADS + KV_HEADS + head) * C + c[None, :], dv.to(v.dtype), mask=inside)
