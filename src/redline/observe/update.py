"""One update of a watched loop: what is noted during it (the batches, where the host waits for the GPU), and the line
it becomes once the device has finished it.

Of a batch the rows are seen and, if it is a mapping with `input_ids`, positions and tokens, hence the share of padding.
A mask on a GPU is summed there; nothing is read back.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.observe.generation import Calls
from redline.train.clock import Clock, Moment

Number = float | Tensor


@dataclass(slots=True)
class Seen:
    """The batches of one update, added up."""

    batches: int = 0
    rows: int = 0
    """Rows of the first batch."""
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


SYNCHRONISING, NOTICE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype"
"""The detector's warning about a wait, and its notice about itself."""


class SyncWatch:
    """Names the lines that make the host wait for the GPU: the update between the constructor and `stop` runs with torch's
    detector on. Only one, because the detector takes over Python's warnings meanwhile; other warnings are passed on. It
    does not see waits inside CUDA libraries or in torch.cuda.synchronize()."""

    def __init__(self) -> None:
        self._before = torch.cuda.get_sync_debug_mode()
        self._caught = warnings.catch_warnings(record=True)
        self._seen = self._caught.__enter__()
        warnings.simplefilter("always")
        self.look(away=False)

    def look(self, *, away: bool) -> None:
        torch.cuda.set_sync_debug_mode(self._before if away else "warn")

    def stop(self) -> list[str]:
        """File and line of every wait."""
        self.look(away=True)
        self._caught.__exit__(None, None, None)
        places = []
        for seen in self._seen or []:
            if SYNCHRONISING in str(seen.message):
                places.append(f"{Path(seen.filename).name}:{seen.lineno}")
            elif NOTICE not in str(seen.message):
                warnings.warn_explicit(seen.message, seen.category, seen.filename, seen.lineno)
        return places


PAUSED = "paused_s"
"""Spans of this name are subtracted from the update; no line has it."""
Late = tuple[list[str], Tensor]
"""Numbers on their way from the GPU, with their names."""


@dataclass(slots=True)
class Update:
    begin: Moment
    began_at: float
    spans: list[tuple[str, Moment, Moment]] = field(default_factory=list)
    """Parts of it, each under a metric's name."""
    seen: Seen = field(default_factory=Seen)
    calls: Calls | None = None
    """What was generated, if it was looked at."""
    waited_s: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    """This and what follows are known at its end, when the device may still be running it."""
    end: Moment = 0.0
    ended_at: float = 0.0
    late: Late | None = None
    added: dict[str, float] = field(default_factory=dict)
    """Numbers learned after it."""


@dataclass
class Lines:
    """Turns updates into lines, and keeps the running counts."""

    clock: Clock
    world_size: int
    tokens_per_step: float | None
    """Tokens per step of this process, if batches do not show them."""
    started_at: float = 0.0
    tokens: float = 0.0
    elapsed_s: float = 0.0
    """Training time before this attempt."""
    plan: dict[str, Any] = field(default_factory=dict)

    def line(self, update: Update) -> dict[str, Any]:
        whole_s = self.clock.seconds(update.begin, update.end)  # waits for the copies too
        numbers = update.numbers
        if update.late is not None:
            numbers |= zip(update.late[0], update.late[1].tolist(), strict=True)
        found: dict[str, Any] = {
            "issue_s": update.ended_at - update.began_at - update.waited_s,
            "elapsed_s": self.elapsed_s + update.ended_at - self.started_at,
        }
        for metric, begin, end in update.spans:
            found[metric] = found.get(metric, 0.0) + self.clock.seconds(begin, end)
        step_s = whole_s - found.pop(PAUSED, 0.0)
        counted, tokens = numbers.pop("counted"), numbers.pop("tokens")
        if numbers["padding_share"] is None and update.seen.masked and counted is not None:
            numbers["padding_share"] = 1 - counted / update.seen.positions
        if tokens is None:
            tokens = self.tokens_per_step if counted is None else counted
        if tokens is not None:
            self.tokens += tokens * self.world_size
            rate = tokens * self.world_size / step_s
            found |= {"tokens": round(self.tokens), "tokens_per_s": rate, **self._shares(rate)}
        for name, value in (numbers | update.added).items():
            if value is not None:
                found[name] = value if math.isfinite(value) else None  # JSON cannot hold nan
        return {"step": update.step, "step_s": step_s, **found}

    def _shares(self, tokens_per_s: float) -> dict[str, float]:
        """Shares of the datasheet peak and of the measured one, if known."""
        hardware, precision = self.plan["hardware"], self.plan["precision"]["value"]
        tflops = self.plan["flops_per_token"]["value"] * tokens_per_s / self.world_size / 1e12
        peaks = {"mfu": hardware["peak_tflops"], "ceiling_share": hardware["measured_tflops"]}
        return {name: tflops / rate for name, rates in peaks.items() if (rate := rates.get(precision))}


def taken(numbers: dict[str, Any]) -> Late | None:
    """Replace every number and every CPU tensor, which the loop may change, by its plain value. Queue copies of what
    is on a GPU without waiting, and return them with their names."""
    late: dict[str, Tensor] = {}
    for name, value in numbers.items():
        if isinstance(value, Tensor) and not value.is_cpu:
            late[name] = _single(name, value).detach().reshape(()).double()
        elif value is not None:
            numbers[name] = _plain(name, value)
    if not late:
        return None
    target = torch.empty(len(late), dtype=torch.float64, pin_memory=True)
    return list(late), target.copy_(torch.stack(list(late.values())), non_blocking=True)


def _single(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        wrong = f"a tensor of shape {tuple(value.shape)}"
        raise ConfigError(f"{name} must be one number per update, got {wrong}: give its mean or sum")
    return value


def _plain(name: str, value: Any) -> float:
    """A number of Python, numpy or torch as a plain float."""
    if isinstance(value, Tensor):
        return float(_single(name, value).item())
    try:
        if isinstance(value, str | bytes | Mapping):  # "3" would pass
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise ConfigError(f"{name} must be one number per update, got {value!r} ({kind})") from error
