"""Causal softmax attention over a batch of equally long rows, by torch's scaled dot-product kernels; and rotary
positions, in the half-rotation layout of Hugging Face.

Which of those kernels runs (flash, cuDNN, ...) is the plan's choice, put into force by `train.execution`.

Shapes: B batch, T tokens, H query heads, K key/value heads, C head width.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.attention import heads

if TYPE_CHECKING:
    from redline.model.transformer import Attention


Rope = tuple[Tensor, Tensor]
"""Cosines and sines, each (positions, head width)."""


def rope_table(config: ModelConfig) -> Rope:
    """Cosines and sines of every position of the context."""
    half = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    positions = torch.arange(config.context_length, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_THC: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (i, i + C/2) of a head by its position's angle, in fp32: bf16 blurs distant positions."""
    cos, sin = (table[:, None, :] for table in rope)
    a, b = x_THC.chunk(2, dim=-1)
    return (x_THC * cos + torch.cat([-b, a], dim=-1) * sin).to(x_THC.dtype)


def older(x: Tensor) -> bool:
    """Whether x is on a GPU before Ampere, which has no flash attention. Of torch's other kernels only the one that
    writes out all scores lets several query heads share keys and values."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)


def attend(attn: "Attention", qkv_BTHC: Tensor, *, rope: Rope | None, copied: bool = False) -> Tensor:
    """The seam's function for a batch: (B, T, H + 2K, C) to (B, T, H * C)."""
    # The kernel would begin again at the end of the angles; `rotate` refuses a batch that is longer.
    reach = rope is not None and len(rope[0]) == qkv_BTHC.shape[1]
    if reach and not copied and (found := by_kernel(attn, qkv_BTHC.flatten(0, 1), rope)) is not None:
        q, k, v = (x_NHC.unflatten(0, qkv_BTHC.shape[:2]) for x_NHC in found)
        return causal(q, k, v)
    q, k, v = attn.split(qkv_BTHC)
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    return causal(q, k, v, copied=copied)


def by_kernel(attn: "Attention", qkv_NHC: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Queries and keys normalised and rotated, and values, if there is a kernel for both; not under autocast, as
    `eager_on_gpu` says."""
    q_norm, k_norm = attn.q_norm, attn.k_norm
    half = qkv_NHC.is_cuda and qkv_NHC.dtype.itemsize == 2 and not torch.is_autocast_enabled("cuda")
    if rope is None or q_norm is None or k_norm is None or not (half and heads.able):
        return None
    given = qkv_NHC, q_norm.weight, k_norm.weight, *rope
    found: tuple[Tensor, Tensor, Tensor] = heads.normed_and_rotated(
        *given, q_norm.eps, attn.heads, attn.kv_heads
    )
    return found


def causal(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, *, copied: bool = False) -> Tensor:
    """Each row attends to itself and to what came before; (B, T, H * C). `copied`: every query head gets its own copy of
    keys and values."""
    group = q_BTHC.shape[2] // k_BTKC.shape[2]
    if copied and group > 1:
        k_BTKC, v_BTKC = (x.repeat_interleave(group, dim=2) for x in (k_BTKC, v_BTKC))
    q, k, v = q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y_BHTC.transpose(1, 2).flatten(2)
