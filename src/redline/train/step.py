"""One optimiser update: schedule, forward, backward, clip, update. Nothing here waits for the GPU (fp16
aside).

The loss of an update is the sum over all its tokens divided by their number, over every pass and process, so
any split of the same batch into passes gives the same gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from redline.errors import TrainingError
from redline.model.transformer import Transformer
from redline.train.optimizer import set_lr
from redline.train.process import Process


@dataclass
class LossScale:
    """fp16's guard against underflow: doubles after `patience` good updates, halves on overflow (and that
    update is skipped)."""

    value: float = 65536.0
    good: int = 0
    patience: int = 2000

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good % self.patience == 0:
            self.value *= 2


@dataclass
class Learner:
    """What an update changes."""

    model: Transformer
    optimizers: Sequence[torch.optim.Optimizer]
    process: Process
    clip_norm: float
    """0: no clipping."""
    scale: LossScale | None = None
    before_update: Callable[[], None] = field(default=lambda: None)
    """Called when the gradients are there and the weights are about to change."""
    mark: Callable[[str], None] = field(default=lambda phase: None)
    """Called at the end of each phase of an update, with its name as a metric."""
    waiting: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    """Stands around what waits for the other processes."""


@dataclass(frozen=True)
class Update:
    """What an update gives; tensors that are still on their way on a GPU."""

    loss: Tensor
    grad_norm: Tensor
    skipped: bool = False


def take_step(
    learner: Learner,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    *,
    micro_batch: int,
    tokens: float,
    lr_factor: float,
) -> Update:
    """Train on one batch (this process's part of it). `tokens` counts the targets of all processes."""
    set_lr(learner.optimizers, lr_factor)
    passes = zip(inputs_BT.split(micro_batch), targets_BT.split(micro_batch), strict=True)
    return update(learner, (learner.model(x_BT, y_BT) for x_BT, y_BT in passes), tokens=tokens)


def update(learner: Learner, loss_sums: Iterable[Tensor], *, tokens: float | Tensor) -> Update:
    """An update at the learning rate that is set, from the summed losses of its passes, each computed when
    its turn comes. `tokens` may lie on the device, where a CUDA graph finds it anew at every replay."""
    scale = learner.scale.value if learner.scale else 1.0
    weight = scale * learner.process.world_size / tokens  # FSDP averages over processes; the loss is a sum
    loss = torch.zeros((), device=learner.process.device)
    for loss_sum in loss_sums:
        learner.mark("forward_s")
        (loss_sum * weight).backward()
        loss += loss_sum.detach()
        learner.mark("backward_s")
    learner.before_update()
    grad_norm = clip(learner, scale)
    skipped = learner.scale is not None and not bool(grad_norm.isfinite())
    if learner.scale is not None:
        learner.scale.update(not skipped)
    if not skipped:
        _change_weights(learner)
    for optimizer in learner.optimizers:
        optimizer.zero_grad(set_to_none=True)
    learner.mark("optimizer_s")
    if learner.process.world_size > 1:
        with learner.waiting():
            dist.all_reduce(loss)
    return Update(loss / tokens, grad_norm, skipped)


def _change_weights(learner: Learner) -> None:
    try:
        for optimizer in learner.optimizers:
            optimizer.step()
    except torch.OutOfMemoryError as error:
        # not to be tried again: a part of the weights would be updated twice
        raise TrainingError(
            "out of memory while the weights were being changed: use more processes or a smaller model; "
            "the same command goes on from the last checkpoint"
        ) from error


def clip(learner: Learner, scale: float) -> Tensor:
    """Undo the loss scale, clip, and return the norm before clipping."""
    parameters = [p for p in learner.model.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if scale != 1.0:
        torch._foreach_mul_(gradients, 1.0 / scale)
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):  # reduced here once, where the wait is timed, and not by each of its uses
        with learner.waiting():
            norm = norm.redistribute(placements=[Replicate()])
    if learner.clip_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, learner.clip_norm, norm, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
