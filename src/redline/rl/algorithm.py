"""What an algorithm decides: which groups teach something, how good each token of an answer was, and the loss.

A new one is a file with these three functions and a line in `run.ALGORITHMS`. Everything else (drawing, packing,
passes, processes) is the same for all of them.

Shapes: A answer tokens of a packed row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redline.model.attention.packed import Packing
from redline.rl.samples import Group, Sample
from redline.train.packed import EMPTY, Example, exact, pack, pack_once, unpack
from redline.train.process import Process
from redline.train.step import Numbers

COPIES_PAY = 0.1
"""Share of tokens from which prompts are read once. A token of a 360M model saves 66 MFLOP in every layer, 0.17 us at
400 TFLOP/s; copying one for attention moves some 25 KB forth and back, with atomic additions about 0.015 us (H200)."""


@dataclass
class Row:
    """An answer to learn from."""

    domain: str
    example: Example
    cut: bool
    reward: float
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Numbers of each answer token: `sampled` (the engine's log-probability), `advantage`, and where they are needed
    `old` (the trainer's before the first update), `value` and `returned`."""


@dataclass(frozen=True)
class Columns:
    """The numbers of a packed row's answer tokens, where the model computes."""

    sampled: Tensor
    advantage: Tensor
    old: Tensor | None = None
    value: Tensor | None = None
    returned: Tensor | None = None
    reference: Tensor | None = None
    """Log-probabilities under the model that the run began with."""


class Algorithm(Protocol):
    def teaches(self, group: Group, rewards: Sequence[float]) -> bool:
        """Whether a group is worth an update."""
        ...

    def rows(self, group: Group, rewards: Sequence[float]) -> list[Row]:
        """The answers of a group to learn from."""
        ...

    def loss(self, logprobs_A: Tensor, given: Columns) -> Numbers:
        """The loss and what else is told, as sums over the tokens."""
        ...


def row_of(group: Group, sample: Sample, reward: float, advantage: float) -> Row:
    """A row whose tokens were all as good."""
    size = len(sample.tokens)
    columns = {
        "sampled": np.array(sample.logprobs, np.float32),
        "advantage": np.full(size, advantage, np.float32),
    }
    return Row(group.domain, Example(group.prompt, sample.tokens), sample.cut, reward, columns)


def share_of(rows: Sequence[Row], process: Process) -> list[Row]:
    """The rows of this process: longest first in turn, so that all have about as many tokens."""
    ordered = sorted(rows, key=lambda row: -row.example.length)
    return ordered[process.rank :: process.world_size]


def shared_tokens(rows: Sequence[Row]) -> int:
    """Prompt tokens that a pass need not read because another of its rows has them; 0 if so few that copies would cost
    more."""
    once = sum(map(len, {row.example.prompt for row in rows}))
    saved = sum(len(row.example.prompt) for row in rows) - once
    return saved if saved > COPIES_PAY * sum(row.example.length for row in rows) else 0


def packed(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Packing]:
    """The rows one after the other: tokens, targets, and where they begin. Without any, a token that counts for
    nothing. Answers to one question share its prompt where that pays."""
    examples = [row.example for row in rows]
    if shared_tokens(rows):
        return pack_once(examples, device)
    shape = exact(examples) if examples else EMPTY
    return unpack(torch.from_numpy(pack(examples, shape)).to(device), shape)


def columns_of(rows: Sequence[Row], device: torch.device) -> Columns:
    """The numbers of the rows' tokens, one after the other as packing has them. A row that holds no answer has one
    token that counts for nothing."""
    names = rows[0].columns if rows else ("sampled", "advantage")
    given = {
        name: np.concatenate([row.columns[name] for row in rows]) if rows else np.zeros(1, np.float32)
        for name in names
    }
    return Columns(**{name: torch.from_numpy(values).to(device) for name, values in given.items()})
