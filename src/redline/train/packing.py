"""Examples packed into rows without padding: one after the other, positions from 0 in each, a loss on the
answers alone.

    words = pack(examples, exact(examples))                           # one row as int32 numbers, on the host
    tokens_1T, targets_1A, packing = unpack(torch.from_numpy(words), shape)
    loss_sum = model(tokens_1T, targets_1A, packing=packing)

A CUDA graph needs fixed shapes, so there a row is filled up to a few sizes (`static_shapes`) with tokens in
sequences of their own that nobody reads. An update may be cut into several passes; all of its rows then have
one shape.

Shapes: T tokens of a row, S sequences in it, A answer tokens.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redline.config.recipe import IGNORED
from redline.errors import DataError
from redline.model.attention.packed import Packing

TOKENS_STEP = 128
"""Sizes of static rows: wider steps pad more, narrower ones make more graphs, each captured in about a
second."""
ANSWERS_STEP, LONGEST_STEP = 64, 64


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer to learn, as token ids. The loss is on the answer, to which its end token
    belongs."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens that the model reads: the last one of the answer is only a target."""
        return len(self.prompt) + len(self.answer) - 1


@dataclass(frozen=True)
class Shape:
    """What is fixed about a row."""

    tokens: int
    answers: int
    sequences: int
    longest: int

    @property
    def sizes(self) -> list[int]:
        """Numbers of each kind in a packed row: tokens, positions, bounds, positions read, targets."""
        return [self.tokens, self.tokens, self.sequences + 1, self.answers, self.answers]


def check_examples(examples: Sequence[Example], *, context_length: int, vocab_size: int) -> None:
    """Raise on the first example that cannot be learnt from."""
    if not examples:
        raise DataError("fine-tuning needs at least one example, got none")
    for i, example in enumerate(examples):
        if not example.prompt or not example.answer:
            raise DataError(
                f"example {i}: prompt and answer must hold at least one token, got {len(example.prompt)},"
                f" {len(example.answer)}"
            )
        if example.length > context_length:
            raise DataError(
                f"example {i} has {example.length} tokens, and the model's context holds {context_length}:"
                " leave it out"
            )
        ids = (*example.prompt, *example.answer)
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise DataError(
                f"example {i}: token ids must lie below the model's vocabulary of {vocab_size}, got"
                f" {min(ids)} to {max(ids)}"
            )


def fingerprint(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(
            np.array([len(example.prompt), *example.prompt, *example.answer, -1], dtype=np.int64).tobytes()
        )
    return digest.hexdigest()[:16]


def batches(count: int, *, batch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """The examples of every update, by number: each epoch in an order of its own, the rest of the last batch
    kept."""
    for epoch in range(epochs):
        order = torch.randperm(
            count, generator=torch.Generator().manual_seed((seed + epoch) % 2**64)
        ).tolist()
        yield from (order[start : start + batch_size] for start in range(0, count, batch_size))


def exact(examples: Sequence[Example]) -> Shape:
    """The shape of a row that holds just these examples."""
    lengths = [example.length for example in examples]
    return Shape(
        sum(lengths), sum(len(example.answer) for example in examples), len(examples), max(lengths, default=0)
    )


def static_shapes(updates: Sequence[Sequence[Shape]], *, context_length: int, single: bool) -> list[Shape]:
    """A shape for every update, from the exact shapes of its passes. There are few different ones: the
    smaller half of the updates share one, larger rows grow in steps of TOKENS_STEP; or a `single` one, where
    each would have to be compiled."""
    longest = min(context_length, _up(max(row.longest for rows in updates for row in rows), LONGEST_STEP))
    needed = [_up(max(row.tokens for row in rows), TOKENS_STEP) for rows in updates]
    least = max(needed) if single else median_high(needed)
    tokens = [max(least, need) for need in needed]
    made = {}
    for size in set(tokens):
        rows = [row for rows, own in zip(updates, tokens, strict=True) for row in rows if own == size]
        answers = _up(max(row.answers for row in rows), ANSWERS_STEP)
        sequences = max(row.sequences + len(_filler(row.tokens, size, longest)) for row in rows)
        made[size] = Shape(size, answers, sequences, longest)
    return [made[size] for size in tokens]


def pack(examples: Sequence[Example], shape: Shape) -> NDArray[np.int32]:
    """One row of the given shape."""
    words = np.zeros(sum(shape.sizes), dtype=np.int32)
    tokens_T, positions_T, bounds_S, read_A, targets_A = np.split(
        words, list(itertools.accumulate(shape.sizes))[:-1]
    )
    starts, used, answers = [], 0, 0
    targets_A[:] = IGNORED
    for example in examples:
        starts.append(used)
        tokens_T[used : used + example.length] = (*example.prompt, *example.answer[:-1])
        used += example.length
        size = len(example.answer)
        read_A[answers : answers + size] = np.arange(used - size, used)
        targets_A[answers : answers + size] = example.answer
        answers += size
    starts += _filler(used, shape.tokens, shape.longest)
    bounds_S[:] = shape.tokens
    bounds_S[: len(starts)] = starts
    positions_T[:] = np.arange(shape.tokens) - np.repeat(bounds_S[:-1], np.diff(bounds_S))
    return words


def unpack(words: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Packing]:
    """Tokens, targets and packing of a row, as views of its numbers where they lie."""
    tokens_T, positions_T, bounds_S, read_A, targets_A = words.split(shape.sizes)
    return tokens_T[None], targets_A[None].long(), Packing(positions_T, bounds_S, shape.longest, read_A)


def _filler(used: int, size: int, longest: int) -> list[int]:
    """Where the sequences begin that fill a row up: none longer than `longest`, beyond which the attention
    kernel leaves garbage."""
    return list(range(used, size, longest)) if used < size else []


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
