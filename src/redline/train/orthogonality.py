"""A penalty that keeps the query and key maps of each head orthonormal: weight x sum over heads of |W W^T - I|^2.

    learner.penalise = penalty(model, recipe.train, step=lambda: progress.step)
    learner.penalise(scale)                     # adds its gradient to the parameters', once an update

W is a head's C rows of the projection, C x hidden size; the gradient, 4 (W W^T - I) W, is two small products a layer,
far below 1 % of an update. It depends on the weights alone, so it is added when the passes are done and their
gradients are reduced: neither passes nor processes multiply it. Sharded weights are gathered, a layer at a time, and
every process keeps its own part of the result.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from redline.config.recipe import TrainConfig
from redline.model.transformer import Attention, Transformer
from redline.train.optimizer import part_of, whole_of


def penalty(
    model: Transformer, train: TrainConfig, step: Callable[[], int]
) -> Callable[[float], dict[str, Tensor]]:
    """What an update calls with its loss scale. `step` tells how many updates are done."""

    def add(scale: float) -> dict[str, Tensor]:
        warm = min(1.0, (step() + 1) / max(1, train.orthogonality_warmup_steps))
        return penalise(model, train.orthogonality * warm * scale, values=train.orthogonality_values)

    return add if train.orthogonality else lambda scale: {}


@torch.no_grad()
def penalise(model: Transformer, weight: float, *, values: bool) -> dict[str, Tensor]:
    """Add the gradient; returns the violation, the RMS of |W W^T - I| / sqrt(C): 0 if all heads are orthonormal."""
    squares = [_penalise(block.attn, weight, values) for block in model.blocks]
    attn = model.blocks[0].attn
    rows = len(squares) * (attn.heads + attn.kv_heads * (2 if values else 1)) * attn.head_size
    return {"orthogonality_violation": (torch.stack(squares).sum() / rows).sqrt()}


def _penalise(attn: Attention, weight: float, values: bool) -> Tensor:
    parameter = attn.qkv.weight
    assert parameter.grad is not None
    rows = (attn.heads + attn.kv_heads * (2 if values else 1)) * attn.head_size
    heads = whole_of(parameter.detach())[:rows].unflatten(0, (-1, attn.head_size))
    gram = heads @ heads.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    gradient = (gram @ heads).flatten(0, 1).mul_(4 * weight)
    if isinstance(parameter, DTensor):
        rest = parameter.shape[0] - rows
        parameter.grad.add_(part_of(F.pad(gradient, (0, 0, 0, rest)), parameter))
    else:
        parameter.grad[:rows].add_(gradient)
    return gram.square().sum()
