"""Fine-tuning on prompts and answers, packed into rows without padding; the loss is on the answers alone.

    updates = batches_of(examples, batch_size=32, epochs=3, seed=0)
    objective = Packed(updates, pass_size=32, context_length=2048, static=True)
    source = Examples(updates, process)

A CUDA graph or compiled code needs fixed shapes, so there (`static`) a row is filled up to a few sizes. Several
processes share the examples of a batch; one that has fewer of them computes a pass that counts for nothing,
because a sharded model must run on all of them together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from redline.train.packing import Example, Shape, batches, exact, pack, static_shapes, unpack
from redline.train.process import Process
from redline.train.step import Learner, Pass

Updates = Sequence[Sequence[Example]]
EMPTY = Shape(tokens=1, answers=1, sequences=1, longest=1)
"""A row that holds no example, and whose one token counts for nothing."""


def batches_of(
    examples: Sequence[Example], *, batch_size: int, epochs: int, steps: int, seed: int
) -> Updates:
    """The examples of every update: `epochs` times all of them, or `steps` updates."""
    per_epoch = -(-len(examples) // batch_size)
    epochs = epochs or -(-steps // per_epoch)
    numbered = batches(len(examples), batch_size=batch_size, epochs=epochs, seed=seed)
    found = [[examples[i] for i in numbers] for numbers in numbered]
    return found[:steps] if steps else found


@dataclass(frozen=True)
class ExampleBatch:
    examples: Sequence[Example]
    position: int
    """Updates done when this one is."""

    @property
    def rows(self) -> int:
        return len(self.examples)

    @cached_property
    def tokens(self) -> int:
        return exact(self.examples).tokens

    @cached_property
    def targets(self) -> int:
        return exact(self.examples).answers


@dataclass
class Examples:
    """The source of a fine-tuning: everything is in memory already."""

    updates: Updates
    """Of this process."""
    done: int = 0
    waited_s: float = field(default=0.0, init=False)

    def next(self) -> ExampleBatch:
        self.done += 1
        return ExampleBatch(self.updates[self.done - 1], self.done)

    def close(self) -> None:
        pass


def share_of(updates: Updates, process: Process) -> Updates:
    """This process's examples of every update."""
    return [update[process.rank :: process.world_size] for update in updates]


class Packed:
    def __init__(
        self,
        updates: Updates,
        *,
        pass_size: int,
        batch_size: int,
        context_length: int,
        static: bool = False,
        single: bool = False,
        even: bool = False,
    ) -> None:
        """`batch_size`: examples of a full update on this process. `single`: one shape for all updates, where
        each would be compiled. `even`: as many passes for a short batch as for a full one."""
        self.updates, self.pass_size, self.batch_size = updates, min(pass_size, batch_size), batch_size
        self.context_length, self.static, self.single = context_length, static, single
        self.even = even or static
        self._choose_shapes()

    @property
    def passes_per_update(self) -> int:
        return -(-self.batch_size // self.pass_size)

    def passes(self, learner: Learner, batch: ExampleBatch) -> Iterable[Pass]:
        device = learner.process.device
        for row, shape in self.rows(batch):
            words = torch.from_numpy(row).to(device)
            yield self.row_pass(learner, words, shape)

    def row_pass(self, learner: Learner, words: torch.Tensor, shape: Shape) -> Pass:
        tokens_1T, targets_1A, packing = unpack(words, shape)
        return learner.rule.learn(learner.model, tokens_1T, targets_1A, packing)

    def rows(self, batch: ExampleBatch) -> list[tuple[NDArray[np.int32], Shape]]:
        """The passes of a batch as packed numbers."""
        fixed = self.shapes[batch.position - 1] if self.static else None
        parts = [(part, fixed or (exact(part) if part else EMPTY)) for part in self._split(batch.examples)]
        return [(pack(part, shape), shape) for part, shape in parts]

    def shrink(self) -> bool:
        if self.pass_size == 1:
            return False
        self.pass_size = -(-self.pass_size // 2)
        self._choose_shapes()
        return True

    def facts(self, batch: ExampleBatch) -> dict[str, float]:
        shape = self.shapes[batch.position - 1] if self.static else None
        room = shape.tokens * self.passes_per_update if shape else batch.tokens
        return {"padding_share": 1 - batch.tokens / room if room else 0.0}

    def _split(self, examples: Sequence[Example]) -> list[Sequence[Example]]:
        """The passes of a batch. As many as a full batch has where their number is fixed: in a graph, and with
        several processes."""
        starts = range(0, self.batch_size if self.even else len(examples), self.pass_size)
        return [examples[start : start + self.pass_size] for start in starts]

    def _choose_shapes(self) -> None:
        self.shapes: list[Shape] = []
        if self.static:
            rows = [[exact(part) for part in self._split(examples)] for examples in self.updates]
            self.shapes = list(static_shapes(rows, context_length=self.context_length, single=self.single))
