"""Rotary positions, in the half-rotation layout of Hugging Face."""

import torch
from torch import Tensor

from redline.config.recipe import ModelConfig

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, each (positions, head width)."""


def rope_table(config: ModelConfig) -> Rope:
    """Cosines and sines of every position of the context."""
    half = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    angles = torch.outer(
        torch.arange(config.context_length, dtype=torch.float32), 1.0 / config.rope_theta**half
    )
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_THC: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (i, i + C/2) of a head by its position's angle, in fp32: bf16 blurs distant positions."""
    cos, sin = (table[:, None, :] for table in rope)
    a, b = x_THC.chunk(2, dim=-1)
    return (x_THC * cos + torch.cat([-b, a], dim=-1) * sin).to(x_THC.dtype)
