"""Batches for training and validation, prepared by threads while the GPU computes.

The batch of a step is the same on any number of processes: rank r takes rows [r * B / W, (r + 1) * B / W) of it.
Threads, not processes, because reading a batch copies from a memory map, which releases the GIL on page faults.
B: batch, T: sequence.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from redline.config.recipe import IGNORED, PIECES
from redline.data.candidates import draw
from redline.data.shards import Job, Position, TokenDataset
from redline.data.stream import TokenStream
from redline.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """This rank's part of one update's sequences."""

    inputs_BT: torch.Tensor
    targets_BT: torch.Tensor
    position: Position
    """Where the next batch starts; a checkpoint after this batch holds it."""
    candidates: torch.Tensor | None = None
    """The words of those tokens over which the softmax is taken (data/candidates.py), if not over all."""

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        some = self.candidates
        inputs_BT, targets_BT = move(self.inputs_BT), move(self.targets_BT)
        return Batch(inputs_BT, targets_BT, self.position, None if some is None else move(some))

    @property
    def rows(self) -> int:
        return len(self.inputs_BT)

    @property
    def tokens(self) -> int:
        return self.inputs_BT.numel()

    @property
    def targets(self) -> int:
        return int((self.targets_BT != IGNORED).sum())


class Loader:
    """Prepares batches ahead; `next` returns them in order, or raises the error of a failed read."""

    def __init__(
        self,
        source: TokenDataset | TokenStream,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        position: Position | None = None,
        threads: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
        candidates: tuple[int, int] | None = None,
        cut: int = 0,
    ) -> None:
        """`candidates`: the number of tokens in the softmax and the size of the vocabulary. `cut`: the number of initial
        batches whose sequences are cut into PIECES; 0 or less: none."""
        if batch_size % world_size:
            processes = f"the number of processes ({world_size})"
            raise ConfigError(f"train.batch_size ({batch_size}) must be a multiple of {processes}")
        self.waited_s = 0.0
        """Time that `next` has spent waiting."""
        share = batch_size // world_size
        self._own = slice(rank * share, (rank + 1) * share)
        self._batch_size, self._cut = batch_size, cut
        self._pin, self._seed, self._candidates = pin_memory and torch.cuda.is_available(), seed, candidates
        self._order = source.order(seq_len=seq_len, seed=seed, position=position, threads=threads)
        # A stream reads from one place, so its jobs run one after another and its threads tokenise.
        readers = 1 if isinstance(source, TokenStream) else threads
        self._pool = ThreadPoolExecutor(
            readers,
            thread_name_prefix="loader",
            # A new thread starts on device 0; pinning there would open a context on it in every process.
            initializer=partial(torch.cuda.set_device, torch.cuda.current_device()) if self._pin else None,
        )
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(readers - 1 + max(1, prefetch)):  # with fewer than threads some would never read
            self._submit()

    def next(self) -> Batch:
        started_s = time.perf_counter()
        try:
            batch = self._ahead[0].result()
        finally:
            self.waited_s += time.perf_counter() - started_s
        self._ahead.popleft()
        self._submit()
        return batch

    def close(self) -> None:
        """Stop preparing and fetching, and wait for the threads."""
        self._order.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        rows = self._own if self._candidates is None else slice(self._batch_size)
        job = self._order.claim(self._batch_size, rows)
        pieces, self._cut = PIECES if self._cut > 0 else 1, self._cut - 1
        self._ahead.append(self._pool.submit(self._prepare, job, pieces))

    def _prepare(self, job: Job, pieces: int) -> Batch:
        rows, position = job()
        parts, words = _shift(rows), None
        if self._candidates is not None:
            size, vocab = self._candidates
            words = torch.from_numpy(draw(parts[1].numpy(), size=size, vocab_size=vocab, seed=self._seed))
            parts = parts[0][self._own], parts[1][self._own]
        inputs_BT, targets_BT = (part.reshape(-1, part.shape[1] // pieces) for part in parts)
        batch = Batch(inputs_BT, targets_BT, position, words)
        if self._pin:
            batch = batch.moved(torch.Tensor.pin_memory)
        return batch


def valid_batches(
    dataset: TokenDataset,
    *,
    seq_len: int,
    sequences: int,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first `sequences` windows, or all there are, each on one rank: inputs and targets of at most `micro_batch`
    rows.

    Every rank gives the same number of batches and rows, because a sharded model must run forward on all ranks
    together: if the windows do not divide evenly, a rank ends with a row whose targets are all IGNORED. Call
    `dataset.need_window` first."""
    count = min(sequences, dataset.windows(seq_len))
    share = -(-count // world_size)
    for first in range(0, share, micro_batch):
        # dealt like cards, so that no rank is more than one window short
        indices = np.arange(first, min(first + micro_batch, share)) * world_size + rank
        inputs_BT, targets_BT = _shift(dataset.read_windows(np.minimum(indices, count - 1), seq_len))
        targets_BT[torch.from_numpy(indices >= count)] = IGNORED
        yield inputs_BT, targets_BT


def _shift(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
