"""A whole fine-tuning update (passes, clipping, AdamW) as a CUDA graph: one launch instead of thousands.

    graphs = UpdateGraphs(learner, shapes, passes=1)      # captures one graph a shape; the weights do not
                                                          move
    update = graphs.run(rows, shape, lr=1e-4, answers=800)

A small model's update on some 1,500 tokens takes the GPU a few milliseconds and the host, launching kernel by
kernel, over a hundred. Every replay reads its row, learning rate and token count from one buffer, filled by
one asynchronous copy from page-locked memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redline.train.packing import Shape, pack, unpack
from redline.train.step import Learner, Update, update

SCALARS = 2
"""Words before the rows: the learning rate and the number of answer tokens, both fp32."""


class UpdateGraphs:
    def __init__(self, learner: Learner, shapes: Iterable[Shape], *, passes: int) -> None:
        self.learner, self.passes = learner, passes
        # the largest first: the others fit its memory
        wanted = sorted(set(shapes), key=lambda shape: shape.tokens, reverse=True)
        words = SCALARS + passes * max(sum(shape.sizes) for shape in wanted)
        self.buffer = torch.zeros(words, dtype=torch.int32, device=learner.process.device)
        self.lr, self.answers = self.buffer[:SCALARS].view(torch.float32).unbind()
        self.answers.fill_(1.0)
        for optimizer in learner.optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["capturable"] = self.lr, True
        self.graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Update]] = {}
        pool: Any = None
        for shape in wanted:
            self.graphs[shape] = self._capture(shape, pool)
            pool = self.graphs[shape][0].pool()

    def run(self, rows: Sequence[NDArray[np.int32]], shape: Shape, *, lr: float, answers: int) -> Update:
        """One update. Its loss and norm are overwritten by the next: copy them before, on the same stream."""
        words = np.concatenate([np.array([lr, answers], dtype=np.float32).view(np.int32), *rows])
        # Page-locked memory of its own each time: torch gives it away again only when the copy is done.
        self.buffer[: len(words)].copy_(torch.from_numpy(words).pin_memory(), non_blocking=True)
        graph, outcome = self.graphs[shape]
        graph.replay()
        return outcome

    def _rows(self, shape: Shape) -> list[Tensor]:
        size = sum(shape.sizes)
        return [self.buffer[SCALARS + i * size : SCALARS + (i + 1) * size] for i in range(self.passes)]

    def _losses(self, shape: Shape) -> Iterable[Tensor]:
        for row in self._rows(shape):
            tokens_1T, targets_1A, packing = unpack(row, shape)
            yield self.learner.model(tokens_1T, targets_1A, packing=packing)

    def _capture(self, shape: Shape, pool: Any) -> tuple[torch.cuda.CUDAGraph, Update]:
        self._warm_up(shape)
        # the graph's memory is its own, and what the warm-up left cached would be missing
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # The thread that writes a checkpoint may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outcome = update(self.learner, self._losses(shape), tokens=self.answers)
        return graph, outcome

    def _warm_up(self, shape: Shape) -> None:
        """Run what will be captured, on a spare optimiser: kernels are compiled and libraries set up, which a
        capture does not allow."""
        for row in self._rows(shape):
            row.copy_(torch.from_numpy(pack([], shape)))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                spare = torch.nn.Parameter(torch.zeros(8, device=self.buffer.device))
                spare.grad = torch.zeros_like(spare)
                in_its_place = torch.optim.AdamW([spare], lr=self.lr, fused=True)
                update(
                    replace(self.learner, optimizers=[in_its_place]), self._losses(shape), tokens=self.answers
                )
                self.learner.model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(stream)
