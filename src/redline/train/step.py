"""One optimiser update: passes, clip, update. Nothing here waits for the GPU (fp16 aside).

    update(learner, objective.passes(batch), targets=131_072)

A pass computes its own gradients, by the learner's rule: back-propagation, or another (feedback.py). Passes
come in named groups, one after the other; `learner.combine` decides how to combine the gradients of several
groups. The loss of an update is the sum over all its targets divided by their number, over every pass and
process, so any split of the same batch into passes gives the same gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from redline.errors import TrainingError
from redline.model.attention.packed import Packing
from redline.model.cross_entropy import Candidates
from redline.model.flat import as_one
from redline.model.transformer import Transformer
from redline.train.process import Process, full, is_spread

Mark = Callable[[str], None]
Numbers = dict[str, Tensor]
"""Sums over the targets of a pass, `loss` among them; the update reports their means."""


@dataclass(frozen=True)
class Pass:
    run: Callable[[float | Tensor, Mark], Numbers]
    """Adds the gradient of weight x its loss to the parameters', marks its phases, and returns its numbers."""
    group: str = ""


def backpropagated(forward: Callable[[], Tensor | Numbers], group: str = "") -> Pass:
    """A pass whose gradient is that of the loss which `forward` computes."""

    def run(weight: float | Tensor, mark: Mark) -> Numbers:
        found = forward()
        numbers = found if isinstance(found, dict) else {"loss": found}
        mark("forward_s")
        (numbers["loss"] * weight).backward()
        mark("backward_s")
        return {name: value.detach() for name, value in numbers.items()}

    return Pass(run, group)


class Lesson(NamedTuple):
    """What a pass of language modelling reads."""

    tokens: Tensor
    targets: Tensor
    packing: Packing | None = None
    candidates: Candidates | None = None


class Rule(Protocol):
    """A learning rule: how a pass of language modelling gets its gradients."""

    def learn(self, model: Transformer, lesson: Lesson) -> Pass: ...


class BackPropagation:
    def learn(self, model: Transformer, lesson: Lesson) -> Pass:
        tokens, targets, packing, candidates = lesson
        return backpropagated(partial(model, tokens, targets, packing=packing, candidates=candidates))


class Combination(Protocol):
    """How the gradients of several groups are combined."""

    def keep(self, group: str) -> None:
        """The passes of a group are done, and their gradients are on the parameters."""

    def finish(self) -> Numbers:
        """All groups are done: leave the gradient of the update on the parameters. Returns numbers to report."""
        ...

    def restart(self) -> None:
        """Forget the groups of an update that was broken off."""


class Sum:
    """The plain combination: gradients of all passes add up."""

    def keep(self, group: str) -> None:
        pass

    def finish(self) -> Numbers:
        return {}

    def restart(self) -> None:
        pass


@dataclass
class LossScale:
    """fp16's guard against underflow: doubles after `patience` good updates, halves (and skips) on overflow."""

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
    rule: Rule = field(default_factory=BackPropagation)
    combine: Combination = field(default_factory=Sum)
    penalise: Callable[[float], Numbers] = field(default=lambda scale: {})
    """Adds the gradient of what depends on the weights alone, times the loss scale; returns numbers to report."""
    before_update: Callable[[], None] = field(default=lambda: None)
    """Called when the gradients are there and the weights are about to change."""
    mark: Mark = field(default=lambda phase: None)
    """Called at the end of each phase of an update, with its name as a metric."""
    waiting: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    """Wraps whatever waits for the other processes."""


@dataclass(frozen=True)
class Update:
    """What an update reports: tensors that are still on their way on a GPU."""

    numbers: Numbers
    skipped: bool = False


def update(learner: Learner, passes: Iterable[Pass], *, targets: float | Tensor) -> Update:
    """One update. `targets`: of all passes and processes; on the device if a CUDA graph is to read it."""
    scale = learner.scale.value if learner.scale else 1.0
    weight = scale * learner.process.world_size / targets  # FSDP averages over processes; the loss is a sum
    sums: Numbers = {"loss": torch.zeros((), device=learner.process.device)}
    for group, members in groupby(passes, key=lambda one: one.group):
        for one in members:
            for name, value in one.run(weight, learner.mark).items():
                sums[name] = sums[name] + value if name in sums else value
        learner.combine.keep(group)
    told = learner.combine.finish()
    told |= learner.penalise(scale)
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
    means = {name: total / targets for name, total in _over_processes(learner, sums).items()}
    return Update({**means, "grad_norm": grad_norm, **told}, skipped)


def _over_processes(learner: Learner, sums: Numbers) -> Numbers:
    if learner.process.world_size == 1:
        return sums
    total = torch.stack([value.float() for value in sums.values()])
    with learner.waiting():
        dist.all_reduce(total)
    return dict(zip(sums, total.unbind(), strict=True))


def _change_weights(learner: Learner) -> None:
    try:
        for optimizer in learner.optimizers:
            optimizer.step()
    except torch.OutOfMemoryError as error:  # another try would update some weights twice
        raise TrainingError(
            "out of memory while the weights were being changed: use more processes or a smaller model; run the"
            " same command again and it resumes from the last checkpoint"
        ) from error


def clip(learner: Learner, scale: float) -> Tensor:
    """Undo the loss scale, clip, and return the norm before clipping."""
    parameters = as_one([p for p in learner.model.parameters() if p.grad is not None])
    gradients = [p.grad for p in parameters if p.grad is not None]
    if scale != 1.0:
        torch._foreach_mul_(gradients, 1.0 / scale)
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if is_spread(norm):  # reduced here once, where the wait is timed, and not by each of its uses
        from torch.distributed.tensor import Replicate

        with learner.waiting():
            norm = norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)
    if learner.clip_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, learner.clip_norm, norm, foreach=True)
    return full(norm)
