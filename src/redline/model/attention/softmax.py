"""Causal softmax attention over a batch of equally long rows, by torch's scaled dot-product kernels.

Which of those kernels runs (flash, cuDNN, ...) is the plan's choice, put into force by `train.execution`.

Shapes: B batch, T tokens, H query heads, K key/value heads, C head width.
"""

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from redline.model.attention.rope import Rope, rotate

if TYPE_CHECKING:
    from redline.model.transformer import Attention


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
