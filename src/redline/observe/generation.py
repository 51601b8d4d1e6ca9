"""What generation computes inside a watched loop: the calls of the model in the phase `generate`, each with its positions and its time.

    calls = Calls(model, clock)
    with calls:                             # hooks are on the model only meanwhile
        model.generate(...)
    calls.facts(generate_s, fastest)        # once the device has got there; for the event `generation`

With a cache of keys and values a call computes one position a row. Without one it computes all of them again: its positions are those of
the call before and one more. What a cached call would take is not measured but read off how the host's time grows with positions: on a
GPU that time is what the launches take, on a CPU it is the work. Left out: models that are compiled as a whole, on which a hook would
compile them again.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from redline.observe.clock import Clock, Moment

WRAPPED = ("module", "pretrained_model", "model", "base_model")
"""Where wrappers (DDP, TRL, PEFT, a Hugging Face model around its body) hold the model that they wrap."""
INPUTS = ("decoder_input_ids", "input_ids", "inputs_embeds")
LEAST_CALLS = 8
"""Fewer calls that begin anew say nothing of how time grows with positions."""
MOST_POINTS, NEIGHBOURS = 32, 4
"""Of the fit; and how many calls at least are one point of it, of which the fastest counts."""
Fastest = dict[tuple[int, int], float]
"""Host seconds of the fastest call of some rows and positions in all updates so far: another program only ever slows a call down."""


class Call(NamedTuple):
    rows: int
    positions: int
    """Of a row."""
    begin: Moment
    end: Moment
    host_s: float


class Calls:
    """The outermost calls of a model or of what it wraps: `generate` of a wrapped model does not pass through its wrapper."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.made: list[Call] = []
        self._clock, self._modules = clock, hookable(model)
        self._handles: list[RemovableHandle] = []
        self._open: tuple[int, int, Moment, float] | None = None
        self._depth = 0

    def __enter__(self) -> None:
        self._depth = 0
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _before(self, _module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1 and (shape := shape_of(given, named)) is not None:
            self._open = (*shape, self._clock.now(), time.perf_counter())

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._open is not None:
            rows, positions, begin, began_at = self._open
            self.made.append(Call(rows, positions, begin, self._clock.now(), time.perf_counter() - began_at))
            self._open = None

    def facts(self, generate_s: float, fastest: Fastest) -> dict[str, float]:
        """What the diagnosis needs, in plain numbers. Waits for the device where it has not passed the last call."""
        repeated = [call for call, repeats in zip(self.made, repeats_prefix(self.made), strict=True) if repeats]
        found = {
            "calls": len(self.made),
            "tokens": sum(call.rows for call in self.made),
            "positions": sum(call.rows * call.positions for call in self.made),
            "generate_s": generate_s,
            "repeated_calls": len(repeated),
        }
        if len(repeated) < LEAST_CALLS:
            return found
        for call in repeated:
            shape = (call.rows, call.positions)
            fastest[shape] = min(call.host_s, fastest.get(shape, call.host_s))
        seconds = [self._clock.seconds(call.begin, call.end) for call in repeated]
        # On a GPU the host may have waited for a place in the queue: there only the fastest calls tell what launches take.
        timed = [(c.rows, c.positions, c.host_s if isinstance(c.begin, float) else fastest[c.rows, c.positions]) for c in repeated]
        return found | {
            "repeated_s": sum(seconds),
            "first_call_s": seconds[0],
            "last_call_s": seconds[-1],
            "cached_call_s": cached_call_s(fastest, timed),
        }


def hookable(model: nn.Module) -> list[nn.Module]:
    """The model and, from the outside in, what it wraps; it ends at a compiled one."""
    found: list[nn.Module] = []
    inner: nn.Module | None = model
    while inner is not None and inner not in found and getattr(inner, "_compiled_call_impl", None) is None:
        found.append(inner)
        if type(inner).__name__ == "OptimizedModule":
            break
        inner = next((held for name in WRAPPED if isinstance(held := getattr(inner, name, None), nn.Module)), None)
    return found


def shape_of(given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and positions of a call; None where no argument shows them."""
    tensors = (*(named.get(name) for name in INPUTS), *given)
    tokens = next((value for value in tensors if isinstance(value, Tensor) and value.ndim >= 2), None)
    return None if tokens is None else (tokens.shape[0], tokens.shape[1])


def repeats_prefix(calls: Sequence[Call]) -> list[bool]:
    """Which calls computed what the call before them had computed: one position more, or as many where a full window moves on."""
    found: list[bool] = []
    for number, call in enumerate(calls):
        more = call.positions - calls[number - 1].positions if number else -1
        found.append(call.positions > 1 and (more == 1 or (more == 0 and found[-1])))
    return found


def cached_call_s(fastest: Fastest, calls: Sequence[tuple[int, int, float]]) -> float:
    """Seconds of a call that computes one position a row and finds the others in a cache, in the place of these (rows, positions, seconds)
    that compute them all.

    R rows of T positions take a + b R T + c R T²: what does not depend on positions, the work on each, and each looking at the others. One
    position a row takes a + b R + c R T. That is fitted to the fastest calls; these were slower by some factor, and a cached one would be.
    """
    terms = fitted(fastest)
    rows, positions, seconds = (np.array(column, dtype=float) for column in zip(*calls, strict=True))
    slower = seconds.sum() / (_terms(rows, positions) @ terms).sum()
    return float(slower * terms @ [1.0, rows.mean(), (rows * positions).mean()])


def fitted(fastest: Fastest) -> np.ndarray:
    """a, b and c, none of them negative, by least squares of the relative errors."""
    points = [(rows, positions, seconds) for (rows, positions), seconds in sorted(fastest.items())]
    count = max(NEIGHBOURS, -(-len(points) // MOST_POINTS))
    groups = [points[start : start + count] for start in range(0, len(points), count)]
    rows, positions = (np.array([fmean(point[i] for point in group) for group in groups]) for i in (0, 1))
    relative = _terms(rows, positions) / np.array([min(point[2] for point in group) for group in groups])[:, None]
    best, least = np.zeros(3), np.inf
    for chosen in (list(some) for number in (1, 2, 3) for some in combinations(range(3), number)):
        found = np.linalg.lstsq(relative[:, chosen], np.ones(len(groups)), rcond=None)[0]
        error = float(np.square(relative[:, chosen] @ found - 1).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[chosen] = found
    return best


def _terms(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(rows), rows * positions, rows * positions**2], axis=1)
