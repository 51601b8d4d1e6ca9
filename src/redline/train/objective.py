"""What a workload hands the loop: a `Job` with batches, and what to do with one.

A `Source` gives batches and says where the next one begins, so that a resumed run continues there. An `Objective`
turns a batch into passes (`step.Pass`); running out of memory makes its passes smaller, never the batch. How an
update is executed, pass by pass or as one CUDA graph, is the `Executor`'s business.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from redline.config.recipe import IGNORED, Recipe
from redline.data.loader import Batch as SequenceBatch
from redline.model.cross_entropy import Candidates
from redline.model.transformer import Transformer
from redline.plan.plan import Plan
from redline.train.open_run import OpenRun
from redline.train.optimizer import set_lr
from redline.train.step import Combination, Learner, Lesson, Pass, Update, update

Position = Any
"""JSON: where a source continues."""


class Batch(Protocol):
    """This process's part of one update."""

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        ...

    @property
    def rows(self) -> int:
        """Sequences or examples."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that the model reads."""
        ...

    @property
    def targets(self) -> int:
        """Tokens that count in the loss."""
        ...


class Source(Protocol):
    waited_s: float
    """Time that `next` spent waiting, over the source's life."""

    def next(self) -> Any: ...
    def close(self) -> None: ...


class Objective(Protocol):
    @property
    def pass_size(self) -> int:
        """Rows in one pass, at most."""
        ...

    def passes(self, learner: Learner, batch: Any) -> Iterable[Pass]: ...

    def shrink(self) -> bool:
        """Make the passes smaller; False where they are as small as they get."""
        ...

    def facts(self, batch: Any) -> dict[str, float]:
        """What the line of this batch's update should say beyond loss and speed."""
        ...


class Capturable(Objective, Protocol):
    """An objective whose updates have a few shapes that are known in advance, as a CUDA graph needs. A shape can be a key,
    and has `tokens` of a pass and `sizes`: the numbers of each kind that make up a pass, one kind after the other."""

    def passes_of(self, shape: Any) -> int:
        """Passes in an update of this shape."""
        ...

    def shapes_from(self, batch: Any) -> Iterable[Any]:
        """The shapes of this batch and of all after it."""
        ...

    def rows(self, batch: Any) -> list[tuple[NDArray[np.int32], Any]]:
        """The passes of a batch as numbers, each with its shape."""
        ...

    def blank(self, shape: Any) -> NDArray[np.int32]:
        """A pass that counts for nothing."""
        ...

    def row_pass(self, learner: Learner, words: torch.Tensor, shape: Any) -> Pass: ...


@dataclass(frozen=True)
class Grid:
    """The shape of an update on sequences of one length."""

    passes: int
    rows: int
    """Rows of one pass."""
    length: int
    candidates: int = 0
    """Words of the candidates of its softmax; 0: it is taken over the whole vocabulary."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def sizes(self) -> list[int]:
        """Inputs, targets, candidates."""
        return [self.tokens, self.tokens, self.candidates]


class Sequences:
    """Language modelling on whole sequences of one length: a pass is a slice of the batch."""

    def __init__(self, *, pass_size: int, share: int) -> None:
        self.pass_size, self._share = pass_size, share
        """`share`: the sequences of a batch on one process; every pass size divides it."""

    def _pass_rows(self, batch: SequenceBatch) -> int:
        """Rows per pass of this batch: more if its sequences are cut."""
        return batch.rows * self.pass_size // self._share

    def passes(self, learner: Learner, batch: SequenceBatch) -> Iterable[Pass]:
        device, model = learner.process.device, learner.model
        there = batch.moved(lambda part: part.to(device, non_blocking=True))
        learner.mark("copy_s")
        parts = (part.split(self._pass_rows(batch)) for part in (there.inputs_BT, there.targets_BT))
        for x_BT, y_BT in zip(*parts, strict=True):
            yield learner.rule.learn(model, Lesson(x_BT, y_BT, None, candidates_of(there.candidates)))

    def shapes_from(self, batch: SequenceBatch) -> list[Grid]:
        """One: while lengths ramp up, the next shape is captured when it comes."""
        candidates, rows = 0 if batch.candidates is None else len(batch.candidates), self._pass_rows(batch)
        return [Grid(batch.rows // rows, rows, batch.inputs_BT.shape[1], candidates)]

    def passes_of(self, shape: Grid) -> int:
        return shape.passes

    def rows(self, batch: SequenceBatch) -> list[tuple[NDArray[np.int32], Grid]]:
        (shape,) = self.shapes_from(batch)
        some = [] if batch.candidates is None else [batch.candidates]
        parts = zip(batch.inputs_BT.split(shape.rows), batch.targets_BT.split(shape.rows), strict=True)
        return [
            (torch.cat([x_BT.int().flatten(), y_BT.int().flatten(), *some]).numpy(), shape)
            for x_BT, y_BT in parts
        ]

    def blank(self, shape: Grid) -> NDArray[np.int32]:
        return np.repeat(np.array([0, IGNORED, 0], dtype=np.int32), shape.sizes)

    def row_pass(self, learner: Learner, words: torch.Tensor, shape: Grid) -> Pass:
        x, y, some = words.split(shape.sizes)
        x_BT, y_BT = (part.view(shape.rows, shape.length) for part in (x, y))
        candidates = candidates_of(some if shape.candidates else None)
        return learner.rule.learn(learner.model, Lesson(x_BT, y_BT.long(), None, candidates))

    def shrink(self) -> bool:
        half = max(1, self.pass_size // 2)
        smaller = [d for d in range(1, self.pass_size) if self._share % d == 0 and d <= half]
        self.pass_size = max(smaller, default=self.pass_size)
        return bool(smaller)

    def facts(self, batch: SequenceBatch) -> dict[str, float]:
        return {}


def candidates_of(words: torch.Tensor | None) -> Candidates | None:
    """The candidates in the words of data/candidates.py."""
    return None if words is None else Candidates(words[:-1], words[-1])


class Executor(Protocol):
    def take(self, batch: Any, *, targets: float, lr_factor: float) -> Update:
        """One update. What it reports may be overwritten by the next: copy it before, on the same stream."""
        ...


class Eager:
    """Pass by pass, kernel by kernel."""

    def __init__(self, learner: Learner, objective: Objective) -> None:
        self.learner, self.objective = learner, objective

    def take(self, batch: Any, *, targets: float, lr_factor: float) -> Update:
        set_lr(self.learner.optimizers, lr_factor)
        return update(self.learner, self.objective.passes(self.learner, batch), targets=targets)


@dataclass(frozen=True, kw_only=True)
class Job:
    recipe: Recipe
    plan: Plan
    steps: int
    """Updates in the run."""
    model: Transformer
    source: Callable[[Position | None, int], Source]
    """Opens the batches from a position on, after so many updates; None: from the beginning."""
    objective: Objective
    data_fingerprint: str
    """Changes when the tokens do; a run resumes only with the data it began with."""
    opened: OpenRun = field(default_factory=OpenRun)
    validate: Callable[[Transformer, int], dict[str, float]] | None = None
    """The `valid_*` metrics, from passes of so many rows; `valid_loss` or `valid_accuracy` picks the best weights."""
    combine: Callable[[Learner, Callable[[], int]], Combination] | None = None
    """Combines the gradients of several groups, from the learner and the updates done; None: sums them."""
    executor: Callable[[Learner, Objective], Executor] = Eager
    """How an update is executed, where no CUDA graph does it."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors that are saved and restored with the model's."""
    derived: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: {}
    """Metrics that follow from the others of a line."""
    initial_weights: Callable[[Transformer], None] | None = None
