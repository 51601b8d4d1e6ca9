"""What an algorithm decides: how good each answer of a group was, and the loss of its tokens. A new one is a file with
these two functions and a line in `run.ALGORITHMS`; drawing, packing, passes and processes are the same for all.

Shapes: A answer tokens of a packed row.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redline.config.rl import RlConfig
from redline.model.attention.packed import Packing
from redline.rl.samples import Group, Sample
from redline.train.packed import Example, pack_once, pack_row
from redline.train.step import Numbers

COPIES_PAY = 0.3
"""Share of tokens from which prompts are read once. On an H200, 24% fewer tokens in all layers of a 360M model saved
just what copying prompts for its attention cost: 301 ms an update either way (LOG.md)."""


@dataclass
class Row:
    """An answer to learn from."""

    domain: str
    example: Example
    cut: bool
    reward: float
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Numbers of each answer token, under the names of `Columns`."""


@dataclass(frozen=True)
class Columns:
    """The numbers of a packed row's answer tokens, where the model computes."""

    sampled: Tensor
    """The engine's log-probabilities."""
    advantage: Tensor
    old: Tensor | None = None
    """The trainer's log-probabilities before the first update, where several follow."""
    value: Tensor | None = None
    returned: Tensor | None = None
    reference: Tensor | None = None
    """Log-probabilities under the model that the run began with."""


@dataclass(frozen=True)
class Part:
    """One update of a rollout."""

    passes: list[tuple[str, list[Row]]]
    """The rows of this process, with the group whose gradients they are."""
    targets: float
    """Targets of all processes."""
    shared_tokens: int
    """Prompt tokens of all processes that were read with another row's."""


class Algorithm(NamedTuple):
    advantages: Callable[[Group, Sequence[float]], Sequence[float | None]]
    """The advantages of a group's answers, from their rewards; None for an answer that teaches nothing."""
    loss: Callable[[Tensor, Columns, RlConfig], Numbers]
    """The loss and what else to report, as sums over the tokens."""

    def rows(self, group: Group, rewards: Sequence[float]) -> list[Row]:
        """The answers of a group to learn from."""
        found = zip(group.answers, rewards, self.advantages(group, rewards), strict=True)
        return [row_of(group, answer, reward, good) for answer, reward, good in found if good is not None]


def row_of(group: Group, sample: Sample, reward: float, advantage: float) -> Row:
    """A row whose tokens were all as good."""
    columns = {
        "sampled": np.array(sample.logprobs, np.float32),
        "advantage": np.full(len(sample.tokens), advantage, np.float32),
    }
    return Row(group.domain, Example(group.prompt, sample.tokens), sample.cut, reward, columns)


def shares_of(rows: Sequence[Row], processes: int) -> list[list[Row]]:
    """The rows of each process. Answers to one question stay together, because they share its prompt; the longest
    questions go first and in turn, so that all processes have about as many tokens."""
    groups = defaultdict[tuple[int, ...], list[Row]](list)
    for row in rows:
        groups[row.example.prompt].append(row)
    together = list(groups.values()) if len(groups) >= processes else [[row] for row in rows]
    together.sort(key=lambda own: -sum(row.example.length for row in own))
    return [[row for own in together[rank::processes] for row in own] for rank in range(processes)]


def shared_tokens(rows: Sequence[Row]) -> int:
    """Prompt tokens that another row of the pass has too; 0 if so few that copies would cost more."""
    once = sum(map(len, {row.example.prompt for row in rows}))
    saved = sum(len(row.example.prompt) for row in rows) - once
    return saved if saved > COPIES_PAY * sum(row.example.length for row in rows) else 0


def packed(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Packing]:
    """Tokens, targets and where rows begin, one row after the other. Without any rows, one ignored token.
    Answers to one question share its prompt where that pays."""
    examples = [row.example for row in rows]
    return (pack_once if shared_tokens(rows) else pack_row)(examples, device)


def columns_of(rows: Sequence[Row], device: torch.device) -> Columns:
    """The numbers of the rows' tokens in the order of `packed`."""
    names = rows[0].columns if rows else ("sampled", "advantage")
    given = {n: np.concatenate([row.columns[n] for row in rows] or [np.zeros(1, np.float32)]) for n in names}
    return Columns(**{name: torch.from_numpy(values).to(device) for name, values in given.items()})


def by_row(rows: Sequence[Row], values_A: Tensor) -> Iterator[tuple[Row, NDArray[np.float32]]]:
    """Each row with the values of its tokens."""
    ends = np.cumsum([len(row.example.answer) for row in rows])
    return zip(rows, np.split(values_A.cpu().numpy(), ends[:-1]) if rows else (), strict=True)
