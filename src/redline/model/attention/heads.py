"""A Triton kernel for queries and keys that are normalised and rotated (qk_norm with rope), forward and backward.

    q, k, v = normed_and_rotated(qkv_NHC, q_weight_C, k_weight_C, cos_TC, sin_TC, 1e-5, q_heads=4, kv_heads=4)

A compiler makes six kernels of this, and those of the backward pass between them in fp32: 1.7 of the 21.6 ms of a small
model's update on an H200. Here one kernel reads the projection and one reads the gradients; the values are copied along,
because the gradient of a slice would be added to the others by a kernel of its own. The products of the weights'
gradient are summed for each block of tokens here, and over the blocks by torch. CUDA and half precision only. A compiler
sees one operation; without one it is no operation, whose first call would import the compiler, in 0.9 s.

Shapes: N tokens, H all heads of the projection (queries, keys, values), C head width, T positions: token n is at n % T.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

able = triton is not None
BLOCK, WARPS = 8, 4
"""Tokens of a program, which takes all of their heads: they share its angles and weights."""


def normed_and_rotated(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """From (qkv, q_weight, k_weight, cos, sin, eps, q_heads, kv_heads): queries, keys and values, each (N, heads, C)."""
    found: tuple[Tensor, Tensor, Tensor]
    found = (_operation if torch.compiler.is_compiling() else _Function.apply)(*given)
    return found


def launch(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, q_heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = qkv.contiguous()
    q, k, v = (qkv.new_empty(len(qkv), heads, qkv.shape[2]) for heads in (q_heads, kv_heads, kv_heads))
    _forward[(_blocks(qkv),)](
        qkv, q_weight, k_weight, cos, sin, q, k, v, len(qkv), len(cos), eps, **_sizes(q, k)
    )  # fmt: skip
    return q, k, v


def launch_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, qkv = (x.contiguous() for x in (dq, dk, dv, qkv))
    dqkv, blocks = torch.empty_like(qkv), _blocks(qkv)
    dweights = torch.empty((blocks, 2, qkv.shape[2]), dtype=torch.float32, device=qkv.device)
    _backward[(blocks,)](
        dq, dk, dv, qkv, q_weight, k_weight, cos, sin, dqkv, dweights, len(qkv), len(cos), eps, **_sizes(dq, dk)
    )  # fmt: skip
    dq_weight, dk_weight = dweights.sum(0)
    return dqkv, dq_weight.to(q_weight.dtype, copy=True), dk_weight.to(k_weight.dtype, copy=True)


def _blocks(qkv: Tensor) -> int:
    return -(-len(qkv) // BLOCK)


def _sizes(q: Tensor, k: Tensor) -> dict[str, Any]:
    half = q.shape[2] // 2
    sizes = {
        "Q_HEADS": q.shape[1],
        "KV_HEADS": k.shape[1],
        "HALF": half,
        "COLUMNS": triton.next_power_of_2(half),
    }
    return {**sizes, "BLOCK": BLOCK, "num_warps": WARPS}


_operation = torch.library.custom_op("redline::normed_and_rotated", launch, mutates_args=())
_backward_operation = torch.library.custom_op(
    "redline::normed_and_rotated_backward", launch_backward, mutates_args=()
)


@_operation.register_fake
def _(
    qkv: Tensor, _q: Tensor, _k: Tensor, _cos: Tensor, _sin: Tensor, _eps: float, q_heads: int, kv_heads: int
) -> tuple[Tensor, ...]:
    return tuple(qkv.new_empty(qkv.shape[0], heads, qkv.shape[2]) for heads in (q_heads, kv_heads, kv_heads))


@_backward_operation.register_fake
def _(_dq: Tensor, _dk: Tensor, _dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *_: Any) -> Any:
    return torch.empty_like(qkv).contiguous(), torch.empty_like(q_weight), torch.empty_like(k_weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps, _, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_operation(*given, *ctx.saved_tensors, ctx.eps), None, None, None, None, None


_operation.register_autograd(_gradients, setup_context=_keep)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        _keep(ctx, given, None)
        return launch(*given)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        given = (dq, dk, dv, *ctx.saved_tensors, ctx.eps)
        return *launch_backward(*given), None, None, None, None, None


if triton is not None:

    @triton.jit
    def _halves(at, inside, HALF: tl.constexpr):
        """Both halves of heads, of weights or of angles."""
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        return first, tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _store(at, first, second, inside, HALF: tl.constexpr):
        dtype = at.dtype.element_ty
        tl.store(at, first.to(dtype), mask=inside)
        tl.store(at + HALF, second.to(dtype), mask=inside)

    @triton.jit
    def _angles(n, column, cos_ptr, sin_ptr, N, T, HALF: tl.constexpr):
        inside, at = (n < N) & (column < HALF), (n % T) * 2 * HALF + column
        cos = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
        return inside, cos, tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _copy(x_ptr, to_ptr, row, to_row, inside, HEADS: tl.constexpr, HALF: tl.constexpr):
        for head in range(HEADS):
            a, b = _halves(x_ptr + row + head * 2 * HALF, inside, HALF)
            _store(to_ptr + to_row + head * 2 * HALF, a, b, inside, HALF)

    @triton.jit
    def _turn(
        x_ptr, weight_ptr, to_ptr, row, to_row, column, inside, cos, sin, eps, HEADS: tl.constexpr, HALF: tl.constexpr
    ):  # fmt: skip
        a_weight, b_weight = _halves(weight_ptr + column, column < HALF, HALF)
        for head in range(HEADS):
            a, b = _halves(x_ptr + row + head * 2 * HALF, inside, HALF)
            scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
            a, b = a * scale * a_weight, b * scale * b_weight
            _store(to_ptr + to_row + head * 2 * HALF, a * cos - b * sin, b * cos + a * sin, inside, HALF)

    @triton.jit
    def _turn_back(
        given_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, given_row, row, column, inside, cos, sin, eps,
        HEADS: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        a_weight, b_weight = _halves(weight_ptr + column, column < HALF, HALF)
        a_sums, b_sums = tl.zeros_like(cos), tl.zeros_like(cos)
        for head in range(HEADS):
            da, db = _halves(given_ptr + given_row + head * 2 * HALF, inside, HALF)
            da, db = da * cos + db * sin, db * cos - da * sin
            a, b = _halves(x_ptr + row + head * 2 * HALF, inside, HALF)
            scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
            a, b = a * scale, b * scale
            a_sums, b_sums = a_sums + da * a, b_sums + db * b
            da, db = da * a_weight, db * b_weight
            along = ((tl.sum(da * a, axis=1) + tl.sum(db * b, axis=1)) / (2 * HALF))[:, None]
            da, db = scale * (da - a * along), scale * (db - b * along)
            _store(dx_ptr + row + head * 2 * HALF, da, db, inside, HALF)
        a_sum, b_sum = tl.sum(a_sums, axis=0)[None, :], tl.sum(b_sums, axis=0)[None, :]
        _store(dweight_ptr + column, a_sum, b_sum, column < HALF, HALF)

    @triton.jit
    def _forward(
        qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, N, T, eps,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, COLUMNS)[None, :]
        n = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
        inside, cos, sin = _angles(n, column, cos_ptr, sin_ptr, N, T, HALF)
        row = n * (Q_HEADS + 2 * KV_HEADS) * 2 * HALF + column
        k_row, v_row = row + Q_HEADS * 2 * HALF, row + (Q_HEADS + KV_HEADS) * 2 * HALF
        q_row, kv_row = n * Q_HEADS * 2 * HALF + column, n * KV_HEADS * 2 * HALF + column
        _turn(qkv_ptr, q_weight_ptr, q_ptr, row, q_row, column, inside, cos, sin, eps, Q_HEADS, HALF)
        _turn(qkv_ptr, k_weight_ptr, k_ptr, k_row, kv_row, column, inside, cos, sin, eps, KV_HEADS, HALF)
        _copy(qkv_ptr, v_ptr, v_row, kv_row, inside, KV_HEADS, HALF)

    @triton.jit
    def _backward(
        dq_ptr, dk_ptr, dv_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, dweight_ptr, N, T, eps,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, COLUMNS)[None, :]
        n = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
        inside, cos, sin = _angles(n, column, cos_ptr, sin_ptr, N, T, HALF)
        row = n * (Q_HEADS + 2 * KV_HEADS) * 2 * HALF + column
        k_row, v_row = row + Q_HEADS * 2 * HALF, row + (Q_HEADS + KV_HEADS) * 2 * HALF
        q_row, kv_row = n * Q_HEADS * 2 * HALF + column, n * KV_HEADS * 2 * HALF + column
        q_sums = dweight_ptr + tl.program_id(0) * 4 * HALF
        _turn_back(
            dq_ptr, qkv_ptr, q_weight_ptr, dqkv_ptr, q_sums, q_row, row, column, inside, cos, sin, eps, Q_HEADS, HALF
        )  # fmt: skip
        _turn_back(
            dk_ptr, qkv_ptr, k_weight_ptr, dqkv_ptr, q_sums + 2 * HALF, kv_row, k_row, column, inside, cos, sin, eps, KV_HEADS, HALF
        )  # fmt: skip
        _copy(dv_ptr, dqkv_ptr, kv_row, v_row, inside, KV_HEADS, HALF)
