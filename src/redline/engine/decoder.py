"""The device side of the local engine: prompts into the pool, samples into slots, rounds of decode steps.

    decoder.read(ids, places)                       # prompts, once each
    decoder.start(starts)                           # samples take slots and get their first token
    round_ = decoder.launch(slots, steps=8, ...)    # returns before the GPU is done
    decoder.go_on()                                 # a further step, while the host looks at the round
    counts, going, tokens, logprobs = round_.wait() # numpy, a row for each slot

A decode step is one CUDA graph for each batch size in use, captured the first time; on a CPU it runs operation by
operation. Only `wait` waits for the device.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.engine import reference
from redline.engine.forward import Forward
from redline.engine.request import Sampling
from redline.engine.state import STOP_IDS, make_slots
from redline.engine.uniform import uniforms
from redline.errors import ConfigError
from redline.model.attention.state import Room
from redline.model.transformer import Transformer

_INTEGERS = ("prompt", "prompt_len", "count", "limit", "last", "open", "top_k")
SMALLEST_BATCH = 8
"""cuBLAS multiplies 8 rows faster than 1 (on an H200, 1.08 against 1.18 ms for a step of a 360M model)."""

GRAPH_TOKENS, GRAPH_STEP, READ_GRAPHS = 4096, 16, 16
"""Most tokens of prompts that a CUDA graph reads, the step to which their length is rounded up, and most graphs. A shape
gets its graph when it comes a second time. On an H200 the first token then came after 2.2 ms instead of 20 (LOG.md)."""


@dataclass(frozen=True)
class Start:
    """Samples of one prompt that take slots."""

    slots: list[int]
    prompt: int
    prompt_len: int
    limit: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    first_sample: int
    """The number of the sample in the first of the slots; the others follow."""


@dataclass(frozen=True)
class Round:
    """Decode steps in progress, and copies of their slots' state that follow them."""

    copies: tuple[Tensor, ...]
    done: Any
    """A CUDA event, or None on a CPU."""

    def wait(self) -> tuple[np.ndarray, ...]:
        """Numbers of new tokens, whether each sample continues, tokens and log-probabilities; a row per slot."""
        if self.done is not None:
            self.done.synchronize()
        return tuple(copy.numpy() for copy in self.copies)


class Decoder:
    def __init__(self, model: Transformer, room: Room, *, whole_batch: bool) -> None:
        """`whole_batch`: every step computes all slots, so that a row's bits do not depend on the others."""
        self.device, self.vocab_size = model.embed.weight.device, model.config.vocab_size
        self.capacity, self.whole_batch = room.slots, whole_batch
        self.max_prompt_tokens = min(room.max_prompt_tokens, model.config.context_length)
        self.max_new_tokens = room.max_new_tokens
        self.slots = make_slots(model.config, room, self.device)
        self.forward = Forward(model, self.slots, room)
        self.ops = _operations(self.device)
        self.cuda = self.graphs = self.device.type == "cuda"
        """Whether a decode step is a CUDA graph; off only to measure what it is worth."""
        self.goes_on = self.cuda
        """Whether a further step hides the host's look at a round; a CPU would only lose time by it."""
        self._last = 0, False
        self._rows = torch.full((room.slots,), self.slots.spare, dtype=torch.int32, device=self.device)
        self._captured: dict[tuple[int, bool], Any] = {}
        self._reads: dict[torch.Size, Any] = {}
        """Shapes of prompts read so far, each with its graph and its input if it has one."""
        self._graph_pool: Any = None

    def read(self, ids: Sequence[Sequence[int]], places: Sequence[int]) -> None:
        """Prompts into their places in the pool, in one pass."""
        longest = max(map(len, ids))
        few = self.graphs and not self.whole_batch and len(ids) * longest <= GRAPH_TOKENS
        if few:
            longest = min(-(-longest // GRAPH_STEP) * GRAPH_STEP, self.max_prompt_tokens)
        tokens = np.zeros((len(ids), longest), dtype=np.int64)
        at, lengths = np.array(places, np.int32), np.array([len(prompt) for prompt in ids], np.int32)
        vocab = self.vocab_size
        try:
            given = np.fromiter(chain.from_iterable(ids), np.int64)
            known = given.min() >= 0 and given.max() < vocab
        except OverflowError:  # beyond 64 bits
            known = False
        if not known:
            low, high = next((min(own), max(own)) for own in ids if min(own) < 0 or max(own) >= vocab)
            raise ConfigError(f"token ids must lie below the vocabulary of {vocab}, got {low} to {high}")
        tokens[np.arange(longest) < lengths[:, None]] = given
        prompts = self._tensor(tokens), self._tensor(at), self._tensor(lengths)
        if few and self._read_again(prompts):
            return
        self.forward.prefill(*prompts)

    def _read_again(self, given: tuple[Tensor, ...]) -> bool:
        """Read by a CUDA graph, if prompts of this shape were read before; returns whether it did."""
        shape = given[0].shape
        if shape not in self._reads:
            self._reads[shape] = None
            return False
        if self._reads[shape] is None:
            if sum(one is not None for one in self._reads.values()) == READ_GRAPHS:
                return False
            own = tuple(part.clone() for part in given)
            self._reads[shape] = self._capture(functools.partial(self.forward.prefill, *own)), own
        graph, own = self._reads[shape]
        for mine, part in zip(own, given, strict=True):
            mine.copy_(part)
        graph.replay()
        return True

    def start(self, starts: Sequence[Start]) -> None:
        """Fill the slots (two copies to the device, scattered there) and choose their first tokens."""
        vocab, sizes = self.vocab_size, np.array([len(one.slots) for one in starts])
        integers = [
            (one.prompt, one.prompt_len, 0, one.limit, 0, 1, min(one.sampling.top_k or vocab, vocab))
            + one.stop_ids + (-1,) * (STOP_IDS - len(one.stop_ids))
            for one in starts
        ]  # fmt: skip
        floats = [(one.sampling.temperature, one.sampling.top_p) for one in starts]
        whose = np.repeat(np.arange(len(starts)), sizes)
        seeds, first = np.array([(one.seed, one.first_sample) for one in starts], np.int64)[whose].T
        samples = first + np.arange(len(first)) - (np.cumsum(sizes) - sizes)[whose]
        random = uniforms(seeds, samples, self.max_new_tokens)
        rows = self._tensor(np.array([slot for one in starts for slot in one.slots], np.int32))
        slots, at, ints = self.slots, rows.long(), self._tensor(np.array(integers, np.int32)[whose])
        numbers = np.concatenate([np.array(floats, np.float32)[whose], random], axis=1)
        reals = self._tensor(numbers).to(slots.uniform.dtype)
        for name, column in zip(_INTEGERS, ints[:, : len(_INTEGERS)].unbind(1), strict=True):
            getattr(slots, name)[at] = column
        slots.stop_ids[at] = ints[:, len(_INTEGERS) :]
        slots.temperature[at], slots.top_p[at], slots.uniform[at] = reals[:, 0], reals[:, 1], reals[:, 2:]
        prompts = ints[:, 0].long()
        self.forward.state.start(at, prompts)
        self._pick(slots.prompt_logits_PV[prompts], rows, any(filters(one.sampling) for one in starts))

    def stop(self, slots: Sequence[int]) -> None:
        """No more tokens for these slots."""
        self.slots.open[self._tensor(np.array(slots))] = 0

    def launch(self, slots: np.ndarray, *, steps: int, filtered: bool) -> Round:
        """Decode steps for these slots; `filtered` if any of them uses top-k or top-p."""
        batch = self.batch_size(len(slots))
        rows = np.full(batch, self.slots.spare, dtype=np.int32)
        rows[: len(slots)] = slots
        self._rows[:batch].copy_(self._tensor(rows))
        self._last = batch, filtered
        for _ in range(steps):
            self._step(batch, filtered)
        at, state = self._rows[: len(slots)].long(), self.slots
        seen = (state.count[at], state.open[at], state.tokens[at], state.logprobs[at])
        if not self.cuda:
            return Round(seen, None)
        copies = tuple(
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in seen
        )
        done = torch.cuda.Event()
        done.record()
        return Round(copies, done)

    def go_on(self) -> None:
        """A further step for the slots of the last round, whose copies do not show it."""
        self._step(*self._last)

    def batch_size(self, rows: int) -> int:
        """Rows that a step computes: there are graphs for powers of two from SMALLEST_BATCH, and for all slots."""
        if self.whole_batch:
            return self.capacity
        if not self.cuda:
            return rows
        if rows == 1 and self.forward.one_row is not None:
            return 1
        return min(self.capacity, max(SMALLEST_BATCH, 1 << (rows - 1).bit_length()))

    def _step(self, batch: int, filtered: bool) -> None:
        if not self.graphs:
            self._decode(batch, filtered)
            return
        if (batch, filtered) not in self._captured:
            kept = self._rows.clone()
            self._rows.fill_(self.slots.spare)  # the rehearsal belongs to no sample
            self._captured[batch, filtered] = self._capture(functools.partial(self._decode, batch, filtered))
            self._rows.copy_(kept)
        self._captured[batch, filtered].replay()

    def _decode(self, batch: int, filtered: bool) -> None:
        rows = self._rows[:batch]
        self._pick(self.forward.decode(rows), rows, filtered)

    def _pick(self, logits_BV: Tensor, rows: Tensor, filtered: bool) -> None:
        cutoff = self.ops.cutoff(logits_BV, self.slots, rows) if filtered else None
        self.ops.pick(logits_BV, self.slots, rows, cutoff)

    def _capture(self, run: Callable[[], None]) -> Any:
        """Record what runs, after a rehearsal, which compiles kernels."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            run()
        return graph

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.cuda else tensor


def _operations(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return reference
    from redline.engine import kernels  # Triton exists only where CUDA does

    return kernels


def filters(sampling: Sampling) -> bool:
    """Whether tokens are chosen from only a part of the vocabulary."""
    return sampling.temperature > 0 and (sampling.top_k is not None or sampling.top_p < 1)
