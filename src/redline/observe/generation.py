"""What generation computes inside a watched loop: the model's calls in the phase `generate`, with positions and times.

    calls, times = Calls(model, clock), CallTimes(clock)
    with calls:                             # hooks the model inside the block
        model.generate(...)
    calls.facts(generate_s, times)          # once the device is done; for the event `generation`

With a key/value cache a call computes one position per row. Without one it computes all of them again: one more than
the call before. The time of a cached call is not measured but inferred from how the host's time grows with positions:
on a GPU that time is the launches, on a CPU the work. Left out: models compiled as a whole, which a hook would
recompile; texts padded to one length from the start, whose calls look like passes that score rows.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from redline.train.clock import Clock, Moment

WRAPPED = ("module", "pretrained_model", "model", "base_model")
"""Where wrappers (DDP, TRL, PEFT, a Hugging Face model around its body) keep the model."""
INPUTS = ("decoder_input_ids", "input_ids", "inputs_embeds")
NEIGHBOURS = 4
"""Shapes that make one point of the fit; the fastest counts."""
LEAST_CALLS = 3 * NEIGHBOURS
"""Calls, each one position longer than the last. Fewer may be chance, and too few points for the fit."""


class Call(NamedTuple):
    rows: int
    positions: int
    """Positions of a row."""
    begin: Moment
    end: Moment
    host_s: float


class Calls:
    """The outermost calls of a model or of what it wraps: `generate` of a wrapped model bypasses its wrapper."""

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

    def __exit__(self, *_: object) -> None:
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

    def facts(self, generate_s: float, times: "CallTimes") -> dict[str, float]:
        """Plain numbers for the diagnosis. Waits until the device has passed the last call."""
        repeated = repeats(self.made)
        found = {
            "calls": len(self.made),
            "tokens": sum(call.rows for call in self.made),
            "positions": sum(call.rows * call.positions for call in self.made),
            "generate_s": generate_s,
            "repeated_calls": len(repeated),
        }
        if not repeated:
            return found
        times.add(repeated)
        seconds = [self._clock.seconds(call.begin, call.end) for call in repeated]
        return found | {
            "repeated_s": sum(seconds),
            "first_call_s": seconds[0],
            "last_call_s": seconds[-1],
            "cached_call_s": times.cached_call_s(),
        }


class CallTimes:
    """Host seconds of the fastest call of each shape so far: another program can only slow a call down."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fastest: dict[tuple[int, int], float] = {}
        self._last: Sequence[Call] = ()

    def add(self, calls: Sequence[Call]) -> None:
        """Add the calls of one update that computed the prefix again."""
        self._last = calls
        for rows, positions, _, _, host_s in calls:
            self._fastest[rows, positions] = min(host_s, self._fastest.get((rows, positions), host_s))

    def cached_call_s(self) -> float:
        """Seconds of a cached call, which computes one position per row, in place of the calls added last.

        R rows of T positions take a + b R T + c R T²: a constant, the work on each position, and each attending to
        the others. One position per row takes a + b R + c R T. The fit uses the fastest calls; the last calls were
        slower by some factor, and so would a cached one be. On a GPU the host may have waited for a place in the
        queue, so there the fastest calls stand for them.
        """
        terms = fitted([(*shape, seconds) for shape, seconds in sorted(self._fastest.items())])
        shapes = [(call.rows, call.positions) for call in self._last]
        took_s = sum(call.host_s for call in self._last)
        if self._clock.is_gpu:
            took_s = sum(self._fastest[shape] for shape in shapes)
        rows, positions = np.array(shapes, dtype=float).T
        slower = took_s / (_terms(rows, positions) @ terms).sum()
        return float(slower * terms @ [1.0, rows.mean(), (rows * positions).mean()])


def fitted(times: Sequence[tuple[int, int, float]]) -> np.ndarray:
    """a, b and c, none negative, of sorted (rows, positions, seconds), by least squares of the relative errors."""
    groups = [times[start : start + NEIGHBOURS] for start in range(0, len(times), NEIGHBOURS)]
    points = [min(group, key=lambda time: time[2]) for group in groups]
    rows, positions, seconds = np.array(points, dtype=float).T
    relative = _terms(rows, positions) / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for chosen in (list(some) for number in (1, 2, 3) for some in combinations(range(3), number)):
        found = np.linalg.lstsq(relative[:, chosen], np.ones(len(points)), rcond=None)[0]
        error = float(np.square(relative[:, chosen] @ found - 1).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[chosen] = found
    return best


def _terms(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(rows), rows * positions, rows * positions**2], axis=1)


# ---- which calls ----


def hookable(model: nn.Module) -> list[nn.Module]:
    """The model and, from the outside in, what it wraps, up to a compiled one."""
    found: list[nn.Module] = []
    inner: nn.Module | None = model
    while inner is not None and inner not in found and getattr(inner, "_compiled_call_impl", None) is None:
        found.append(inner)
        if type(inner).__name__ == "OptimizedModule":
            break
        held = (getattr(inner, name, None) for name in WRAPPED)
        inner = next((module for module in held if isinstance(module, nn.Module)), None)
    return found


def shape_of(given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and positions of a call; None if no argument shows them."""
    tensors = (*(named.get(name) for name in INPUTS), *given)
    tokens = next((value for value in tensors if isinstance(value, Tensor) and value.ndim >= 2), None)
    return None if tokens is None else (tokens.shape[0], tokens.shape[1])


def repeats(calls: Sequence[Call]) -> list[Call]:
    """The calls that computed what the call before had computed: one position more each time, then equally many once
    a full window moves on. Passes that score texts sorted by length grow too, but not by one each time, and they grow
    again after two of one length; chains short enough for chance are left out."""
    chains: list[list[Call]] = [[]]
    stays = False
    for before, call in pairwise(calls):
        more = call.positions - before.positions
        again = call.rows <= before.rows and (more == 1 or (more == 0 and chains[-1] != []))
        if not again or (more == 1 and stays):
            chains.append([])
        if again:
            chains[-1].append(call)
        stays = more == 0
    long = [chain for chain in chains if len({call.positions for call in chain}) >= LEAST_CALLS]
    return [call for chain in long for call in chain]
