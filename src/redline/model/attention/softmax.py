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


def attend(attn: "Attention", qkv_BTHC: Tensor, *, rope: Rope | None) -> Tensor:
    """The seam's function for a batch: (B, T, H + 2K, C) to (B, T, H * C)."""
    q, k, v = attn.split(qkv_BTHC)
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    return causal(q, k, v)


def causal(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """Each row attends to itself and to what came before; (B, T, H * C)."""
    q, k, v = q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y_BHTC.transpose(1, 2).flatten(2)
