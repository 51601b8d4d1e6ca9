"""What a batch shows: rows, and if it is a mapping with `input_ids`, positions and tokens, hence the share of padding.

A mask on a GPU is summed there; nothing is read back. Of batches of other shapes only the rows are seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Number = float | Tensor


@dataclass(slots=True)
class Seen:
    """The batches of one update, added up."""

    batches: int = 0
    rows: int = 0
    """Of the first batch."""
    seq_len: int = 0
    """The longest; 0 if no batch had `input_ids`."""
    positions: int = 0
    tokens: Number = 0
    masked: bool = False
    """Whether an attention mask said which positions hold a token."""

    def add(self, batch: Any) -> None:
        self.batches += 1
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor):
            self.rows = self.rows or _rows(batch)
            return
        mask = batch.get("attention_mask")
        # A mask of four dimensions says who attends to whom, not what is padding.
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            self._extend(ids, ids.shape[0] * ids.shape[1])
            return
        self.masked = True
        if mask.is_cpu:
            # numpy, because a torch call between two updates runs on cold caches and costs ten times as much.
            array = mask.numpy()
            self._extend(array, int(np.count_nonzero(array)))
        else:
            self._extend(mask, mask.sum())

    def _extend(self, ids: Any, tokens: Number) -> None:
        rows, length = ids.shape[:2]
        self.rows = self.rows or rows
        self.seq_len = max(self.seq_len, length)
        self.positions += rows * length
        self.tokens = self.tokens + tokens


def _rows(batch: Any) -> int:
    """Length of the first tensor in the batch; 0 if there is none."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, Mapping | list | tuple):
        parts = (batch,)
    return next((part.shape[0] for part in parts if isinstance(part, Tensor) and part.ndim), 0)
