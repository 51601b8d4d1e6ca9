"""A penalty that keeps the query and key maps of each head orthonormal: weight x sum over heads of |W W^T - I|^2.

    learner.penalise = penalty(model, recipe.train, step=lambda: progress.step)
    learner.penalise(scale)                     # adds its gradient to the parameters', once an update

W is a head's C rows of the projection, C x hidden size; the gradient, 4 (W W^T - I) W, is two small products. They take
several layers at a time, because a layer's alone are bound by their launches (LOG.md). It depends on the weights alone,
so it is added when the passes are done and their gradients are reduced: neither passes nor processes multiply it.
Sharded weights are gathered, and every process keeps its own part of the result.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import TrainConfig
from redline.model.transformer import Transformer, part_of
from redline.train.process import full, is_spread

TOGETHER_BYTES = 64 * 2**20
"""Bytes of the maps that are computed together; they are copied for it."""


def penalty(
    model: Transformer, train: TrainConfig, step: Callable[[], int]
) -> Callable[[float], dict[str, Tensor]]:
    """The function that an update calls with its loss scale. `step` tells how many updates are done."""

    def add(scale: float) -> dict[str, Tensor]:
        warm = min(1.0, (step() + 1) / max(1, train.orthogonality_warmup_steps))
        return penalise(model, train.orthogonality * warm * scale, values=train.orthogonality_values)

    return add if train.orthogonality else lambda scale: {}


@torch.no_grad()
def penalise(model: Transformer, weight: float, *, values: bool) -> dict[str, Tensor]:
    """Add the gradient; returns the violation, the RMS of |W W^T - I| / sqrt(C): 0 if all heads are orthonormal."""
    attn = model.blocks[0].attn
    rows = (attn.heads + attn.kv_heads * (2 if values else 1)) * attn.head_size
    together = max(1, TOGETHER_BYTES // (4 * rows * attn.qkv.in_features))
    parameters = [block.attn.qkv.weight for block in model.blocks]
    squares = [
        _penalise(parameters[at : at + together], rows, attn.head_size, weight)
        for at in range(0, len(parameters), together)
    ]
    return {"orthogonality_violation": (torch.stack(squares).sum() / len(parameters) / rows).sqrt()}


def _penalise(parameters: Sequence[Tensor], rows: int, head_size: int, weight: float) -> Tensor:
    """Add the gradient for some layers; returns the sum of |W W^T - I|^2."""
    maps = torch.stack([full(p.detach())[:rows] for p in parameters])
    heads = maps.unflatten(1, (-1, head_size))
    gram = heads @ heads.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    gradients = (gram @ heads).flatten(1, 2).mul_(4 * weight).unbind()
    for p, gradient in zip(parameters, gradients, strict=True):
        assert p.grad is not None
        if is_spread(p):
            p.grad.add_(part_of(F.pad(gradient, (0, 0, 0, p.shape[0] - rows)), p))
        else:
            p.grad[:rows].add_(gradient)
    return gram.square().sum()
