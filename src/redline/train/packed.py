"""Fine-tuning on prompts and answers, packed into rows without padding; the loss is on the answers alone.

    updates = batches_of(examples, batch_size=32, epochs=3, seed=0)
    objective = Packed(updates, pass_size=32, context_length=2048, static=True)
    source = Examples(updates, process)

    words = pack(examples, exact(examples))                           # one row as int32 numbers, on the host
    tokens_1T, targets_1A, packing = unpack(torch.from_numpy(words), shape)
    loss_sum = model(tokens_1T, targets_1A, packing=packing)

Examples follow one another in a row, with positions from 0 in each. A CUDA graph or compiled code needs fixed shapes, so
there (`static`) a row is filled up to a few sizes with unread sequences. Several processes share the examples
of a batch; one that has fewer computes a pass that counts for nothing, because a sharded model must run on all of them.

Shapes: T tokens of a row, S sequences in it, A answer tokens.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_high

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redline.config.recipe import IGNORED
from redline.errors import DataError
from redline.model.attention.packed import Copies, Packing
from redline.train.step import Learner, Lesson, Pass

TOKENS_STEP = 128
"""Sizes of static rows: wider steps pad more, narrower ones need more graphs, each captured in a second."""
ANSWERS_STEP, LONGEST_STEP = 64, 64


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer to learn, as token ids. The loss is on the answer, end token included."""

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
    """Raise on the first example that cannot be learned."""
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
                f"example {i} has {example.length} tokens, more than the context of {context_length}: leave it out"
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
        words = [len(example.prompt), *example.prompt, *example.answer, -1]
        digest.update(np.array(words, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def batches(count: int, *, batch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """The examples of every update, by number: each epoch in its own order, with a short last batch."""
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed((seed + epoch) % 2**64)
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + batch_size] for start in range(0, count, batch_size))


def exact(examples: Sequence[Example]) -> Shape:
    """The shape of a row that holds just these examples."""
    lengths = [example.length for example in examples]
    answers = sum(len(example.answer) for example in examples)
    return Shape(sum(lengths), answers, len(examples), max(lengths, default=0))


def static_shapes(updates: Sequence[Sequence[Shape]], *, context_length: int, single: bool) -> list[Shape]:
    """A shape for every update: the smaller half share one, larger rows grow by TOKENS_STEP; or a `single` one."""
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
    ends = list(itertools.accumulate(shape.sizes))[:-1]
    tokens_T, positions_T, bounds_S, read_A, targets_A = np.split(words, ends)
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


def pack_row(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Packing]:
    """Tokens, targets and packing of a row that holds just these; without any, one token that counts for nothing."""
    shape = exact(examples) if examples else EMPTY
    return unpack(torch.from_numpy(pack(examples, shape)).to(device), shape)


def pack_once(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Packing]:
    """Tokens, targets and packing of a row that holds equal prompts once. A question has many answers to learn from, and
    all layers but attention then read its prompt once for all of them."""
    tokens: list[int] = []
    positions: list[int] = []
    spread: list[NDArray[np.int64]] = []
    kept: list[NDArray[np.int64]] = []
    reads: list[NDArray[np.int64]] = []
    prompts: dict[tuple[int, ...], int] = {}
    bounds = [0]
    for example in examples:
        size = len(example.prompt)
        if (start := prompts.setdefault(example.prompt, len(tokens))) == len(tokens):
            tokens += example.prompt
            positions += range(size)
            kept.append(np.arange(bounds[-1], bounds[-1] + size))
        prompt, answer = np.arange(start, start + size), np.arange(len(example.answer) - 1)
        kept.append(bounds[-1] + size + answer)
        spread += [prompt, len(tokens) + answer]
        reads += [prompt[-1:], len(tokens) + answer]
        tokens += example.answer[:-1]
        positions += range(size, example.length)
        bounds.append(bounds[-1] + example.length)
    targets = [token for example in examples for token in example.answer]
    lists = [np.array(given) for given in (tokens, positions, bounds, targets)]
    parts = [*lists, *map(np.concatenate, (reads, spread, kept))]
    words = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device)
    tokens_T, positions_T, bounds_S, targets_A, read_A, spread_E, kept_T = words.split(
        [len(part) for part in parts]
    )
    longest, copies = max(example.length for example in examples), Copies(spread_E, kept_T)
    packing = Packing(positions_T, bounds_S, longest, read_A, copies)
    return tokens_T[None], targets_A[None].long(), packing


def _filler(used: int, size: int, longest: int) -> list[int]:
    """Where the sequences that fill up a row begin. The attention kernel takes none longer than `longest`."""
    return list(range(used, size, longest)) if used < size else []


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


# ---- the workload ----

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
    """The source of batches for fine-tuning: everything is in memory already."""

    updates: Updates
    """Updates of this process."""
    done: int = 0
    waited_s: float = field(default=0.0, init=False)

    def next(self) -> ExampleBatch:
        self.done += 1
        return ExampleBatch(self.updates[self.done - 1], self.done)

    def close(self) -> None:
        pass


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
        """`batch_size`: of a full update here. `single`: one shape for all updates. `even`: one pass count."""
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
        return learner.rule.learn(learner.model, Lesson(*unpack(words, shape)))

    def shapes_from(self, batch: ExampleBatch) -> list[Shape]:
        return self.shapes[batch.position - 1 :]

    def passes_of(self, shape: Shape) -> int:
        return self.passes_per_update

    def blank(self, shape: Shape) -> NDArray[np.int32]:
        return pack([], shape)

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
        """The passes of a batch: as many as a full batch has if their number is fixed (`even`)."""
        starts = range(0, self.batch_size if self.even else len(examples), self.pass_size)
        return [examples[start : start + self.pass_size] for start in starts]

    def _choose_shapes(self) -> None:
        self.shapes: list[Shape] = []
        if self.static:
            rows = [[exact(part) for part in self._split(examples)] for examples in self.updates]
            self.shapes = list(static_shapes(rows, context_length=self.context_length, single=self.single))
