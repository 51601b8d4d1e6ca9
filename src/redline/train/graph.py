"""A whole update (passes, clipping, optimiser) as a CUDA graph: one launch instead of thousands.

    executor = Captured(learner, objective, event=...)
    update = executor.take(batch, targets=800, lr_factor=0.5)      # captures at the first call; then replays

A small model's update on some 1,500 tokens takes the GPU a few milliseconds and the host, launching kernel by
kernel, over a hundred. Every replay reads its rows, target count, learning rates and momenta from one buffer, filled by
one asynchronous copy from page-locked memory.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.errors import TrainingError
from redline.train.objective import Capturable
from redline.train.optimizer import AdamW, Muon
from redline.train.step import Learner, Pass, Update, update
from redline.train.workspace import Workspace, workspace_of

OUT_OF_MEMORY = "CUDA error: out of memory"
"""torch's words for a driver that is out of memory."""


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, here or in what led to this error: a capture that it broke off may end in another one."""
    while (
        error is not None
        and not isinstance(error, torch.OutOfMemoryError)
        and OUT_OF_MEMORY not in str(error)
    ):
        error = error.__cause__ or error.__context__
    return error is not None


class Captured:
    def __init__(self, learner: Learner, objective: Capturable, event: Callable[..., None]) -> None:
        self.before_update, self.objective, self.event = learner.before_update, objective, event
        # What is captured must not wait for a checkpoint's copy or record events: both are done around a replay.
        self.learner = replace(learner, before_update=lambda: None, mark=lambda phase: None)
        self.groups = [group for optimizer in learner.optimizers for group in optimizer.param_groups]
        self.scalars = 1 + 2 * len(self.groups)
        """Words before the rows, all fp32: the number of targets, then every group's learning rate and momentum."""
        self.workspace: Workspace | None = None
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Update]] = {}

    def take(self, batch: Any, *, targets: float, lr_factor: float) -> Update:
        self.before_update()  # and before a capture: its warm-up writes to Muon's weights, if only the same bits
        rows = self.objective.rows(batch)
        if rows[0][1] not in self.graphs:
            self._try_to_capture(self.objective.shapes_from(batch))
        rates = [(group["peak_lr"] * lr_factor, group.get("momentum", 0.0)) for group in self.groups]
        scalars = np.array([targets, *(number for pair in rates for number in pair)], dtype=np.float32)
        words = np.concatenate([scalars.view(np.int32), *(row for row, _ in rows)])
        # New page-locked memory each time: torch reuses it only when the copy is done.
        self.buffer[: len(words)].copy_(torch.from_numpy(words).pin_memory(), non_blocking=True)
        graph, outcome = self.graphs[rows[0][1]]
        graph.replay()
        return outcome

    def _try_to_capture(self, to_come: Iterable[Any]) -> None:
        """Capture. If memory runs out, the error is an OutOfMemoryError, after which the loop tries smaller passes: also where
        the optimiser lacks it, because no weight has changed yet, or the driver, which makes a graph outside of torch's
        allocator. If CUDA refuses the capture for another reason, the error names the way out.

        Neither a context manager (from Python 3.12 on) nor a variable may hold the new error: in a reference cycle it would
        keep the memory of the failed capture until the collector comes."""
        try:
            self._capture_all(to_come)
        except (TrainingError, torch.AcceleratorError) as error:
            if _lacks_memory(error):
                raise torch.OutOfMemoryError(str(error)) from error
            if isinstance(error, TrainingError):
                raise
            said = str(error).partition("\n")[0]
            raise TrainingError(
                f"the update cannot be captured as a CUDA graph ({said}): plan.graph=false runs it kernel by kernel"
            ) from error

    def _capture_all(self, to_come: Iterable[Any]) -> None:
        """One graph for each shape that is still to come; the weights do not move."""
        started_s, self.graphs = time.perf_counter(), {}
        # The largest first: the others fit its memory.
        shapes = sorted(set(to_come), key=lambda shape: shape.tokens, reverse=True)
        passes = self.objective.passes_of(shapes[0])
        size = self.scalars + passes * max(sum(shape.sizes) for shape in shapes)
        self.buffer = torch.zeros(size, dtype=torch.int32, device=self.learner.process.device)
        self.targets, *numbers = self.buffer[: self.scalars].view(torch.float32).unbind()
        self.targets.fill_(1.0)
        if passes == 1:
            self.workspace = workspace_of(self.learner)
        pool: Any = None
        graphs = {}
        with self._read_from(numbers):
            for shape in shapes:
                graphs[shape] = self._capture(shape, pool)
                pool = graphs[shape][0].pool()
        self.graphs = graphs
        seconds = round(time.perf_counter() - started_s, 3)
        sizes = sorted(shape.tokens for shape in shapes)
        one_piece = self.workspace is not None
        self.event("captured", graphs=len(graphs), rows_tokens=sizes, seconds=seconds, one_piece=one_piece)

    @contextmanager
    def _read_from(self, numbers: list[Tensor]) -> Iterator[None]:
        """Inside, optimisers find learning rates and momenta on the device. Momenta are numbers again afterwards: the loop
        changes them while Muon warms up."""
        momenta = [group.get("momentum") for group in self.groups]
        for group, lr, momentum in zip(self.groups, numbers[::2], numbers[1::2], strict=True):
            group["lr"], group["capturable"] = lr, True
            if "momentum" in group:
                group["momentum"] = momentum.fill_(1.0)  # with a learning rate of 0 a warm-up changes nothing
        try:
            yield
        finally:
            for group, value in zip(self.groups, momenta, strict=True):
                if value is not None:
                    group["momentum"] = value

    def _rows(self, shape: Any) -> list[Tensor]:
        size = sum(shape.sizes)
        starts = (self.scalars + i * size for i in range(self.objective.passes_of(shape)))
        return [self.buffer[start : start + size] for start in starts]

    def _passes(self, shape: Any) -> Iterable[Pass]:
        return (self.objective.row_pass(self.learner, row, shape) for row in self._rows(shape))

    def _capture(self, shape: Any, pool: Any) -> tuple[torch.cuda.CUDAGraph, Update]:
        self._warm_up(shape)
        torch.cuda.empty_cache()  # the graph has its own memory, and would lack what the warm-up left cached
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # The thread that writes a checkpoint may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outcome = self._update(self.learner, shape)
        finally:
            torch.cuda.set_stream(here)  # torch leaves its own in place if the end of a capture fails
        return graph, outcome

    def _update(self, learner: Learner, shape: Any) -> Update:
        if self.workspace is None:
            return update(learner, self._passes(shape), targets=self.targets)
        with self.workspace.in_use():
            together = replace(learner, before_update=self.workspace.take_gradients)
            return update(together, self._passes(shape), targets=self.targets)

    def _warm_up(self, shape: Any) -> None:
        """Run it on a spare AdamW first: a capture cannot compile kernels or set up libraries."""
        muons = [optimizer for optimizer in self.learner.optimizers if isinstance(optimizer, Muon)]
        for row in self._rows(shape):
            row.copy_(torch.from_numpy(self.objective.blank(shape)))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                spare = torch.nn.Parameter(torch.zeros(8, device=self.buffer.device))
                spare.grad = torch.zeros_like(spare)
                in_its_place = AdamW([spare], lr=self.groups[0]["lr"], fused=True)
                self._update(replace(self.learner, optimizers=[in_its_place, *muons]), shape)
                self.learner.model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(stream)
