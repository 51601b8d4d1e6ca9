"""A decode step for a single row: five kernels per layer instead of eight, and each begins while the one before runs.

    logits_1V = decode(model, state, last_N, rows)          # if `computes(model)`

A step of one row reads every weight for a dot product, so its time depends on the number of its kernels and on how long each takes
to get going (H200, 360M: 0.56 ms, 1.16 with cuBLAS). A product is fused with its neighbours: the norm before it, SwiGLU
or the addition to the residual stream after it; and it asks for its weights before it waits for its input. With tensor
cores the same fusions lost to cuBLAS from 8 rows on (LOG.md).

Shapes: K inputs, N outputs of a product, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from redline.model.attention.state import Rows, State
from redline.model.kernels import overlap
from redline.model.transformer import Norm, Transformer

MOST_INPUTS = 4096
"""Most inputs of a product: a program holds all of them for its outputs in registers."""


def computes(model: Transformer) -> bool:
    """Whether the model is of this shape: RMSNorm, SwiGLU, no biases, half precision."""
    config, half = model.config, model.compute_dtype != torch.float32
    shaped = config.norm == "rmsnorm" and config.activation == "swiglu" and config.positions == "rope"
    small = max(config.hidden_size, config.ffn_size, config.num_heads * config.head_size) <= MOST_INPUTS
    return half and shaped and small and not (config.bias or config.qkv_bias)


@torch.no_grad()
def decode(model: Transformer, state: State, last_N: Tensor, rows: Rows) -> Tensor:
    x = model.embed.weight[last_N[rows.slot_B].long()].to(model.compute_dtype)
    for layer, block in enumerate(model.blocks):
        attn, ffn = block.attn, block.ffn
        qkv = _product(x, attn.qkv.weight, norm=block.attn_norm)
        y = state.step(layer, attn, qkv.unflatten(1, (-1, attn.head_size)), rows)
        _product(y, attn.out.weight, add=x)
        h = _product(x, ffn.up.weight, norm=block.ffn_norm, swiglu=True)
        _product(h, ffn.down.weight, add=x)
    return _product(x, model.head.weight, norm=model.norm, dtype=torch.float32)


def _product(
    x_1K: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    swiglu: bool = False,
    add: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """norm(x) @ weight.T, or SwiGLU of that, or `add` with x @ weight.T added to it in place."""
    K, N = x_1K.shape[1], len(weight) // (2 if swiglu else 1)
    out = torch.empty(1, N, dtype=dtype or x_1K.dtype, device=x_1K.device) if add is None else add
    wide = triton.next_power_of_2(K)
    # 4,096 weights per program and 32 of them per thread, found by a sweep on an H200
    BN = max(4, min(16, 4096 // wide)) * (2 if N > 2**14 else 1)
    _dot[(triton.cdiv(N, BN),)](
        x_1K, weight, x_1K if norm is None else norm.weight, out, N, 0.0 if norm is None else norm.eps,
        K=K, NORM=norm is not None, SWIGLU=swiglu, ADD=add is not None, BN=BN, BK=wide,
        num_warps=max(2, min(8, BN * wide // 2048)), **overlap(x_1K.device),
    )  # fmt: skip
    return out


@triton.jit
def _dot(
    x_ptr, weight_ptr, norm_ptr, out_ptr, N, eps,
    K: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    known = k < K
    w_at = weight_ptr + tl.where(n < N, n, 0).to(tl.int64)[:, None] * K + k[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    w = tl.load(w_at, mask=known[None, :], other=0.0)
    if SWIGLU:
        up_w = tl.load(w_at + N * K, mask=known[None, :], other=0.0)
    if NORM:
        scale = tl.load(norm_ptr + k, mask=known, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    x = tl.load(x_ptr + k, mask=known, other=0.0).to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x * x) / K + eps)
        x = (x * scale).to(x_ptr.dtype.element_ty).to(tl.float32) * root
    dtype = out_ptr.dtype.element_ty
    y = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if SWIGLU:
        up = tl.sum(up_w.to(tl.float32) * x[None, :], axis=1).to(dtype).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    if ADD:
        y = tl.load(out_ptr + n, mask=n < N, other=0.0).to(tl.float32) + y.to(dtype).to(tl.float32)
    tl.store(out_ptr + n, y.to(dtype), mask=n < N)
