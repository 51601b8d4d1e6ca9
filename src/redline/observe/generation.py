"""What generation computes inside a watched loop: the model's calls in the phase `generate`, with positions and times.

    calls = Calls(model, clock)
    with calls:                             # hooks the model inside the block
        model.generate(...)
    calls.facts(generate_s)                 # once the device is done; for the event `generation`

With a key/value cache a call computes one position a row. Without one it computes all of them again: one more than
the call before. The time of a cached call is not measured but inferred from how the host's time grows with positions:
on a GPU that time is the launches, on a CPU the work. Left out: models compiled as a whole, which a hook would
recompile; texts padded to one length from the start, whose calls look like passes that score rows.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from redline.observe.clock import Clock, Moment

WRAPPED = ("module", "pretrained_model", "model", "base_model")
"""Where wrappers (DDP, TRL, PEFT, a Hugging Face model around its body) keep the model."""
INPUTS = ("decoder_input_ids", "input_ids", "inputs_embeds")
LEAST_CALLS = 12
"""Calls, each one position longer than the last. Fewer may be chance, and say little about their times."""


class Call(NamedTuple):
    rows: int
    positions: int
    """Of a row."""
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

    def facts(self, generate_s: float) -> dict[str, float]:
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
        seconds = [self._clock.seconds(call.begin, call.end) for call in repeated]
        return found | {
            "repeated_s": sum(seconds),
            "first_call_s": seconds[0],
            "last_call_s": seconds[-1],
            "cached_call_s": cached_call_s(repeated),
        }


def cached_call_s(calls: Sequence[Call]) -> float:
    """Seconds of a call that computes one position a row: the straight line through the shortest and the longest quarter
    of the calls, by the medians of their work and their host's time."""
    ordered = sorted((call.rows * call.positions, call.host_s) for call in calls)
    quarter = len(ordered) // 4
    short, short_s = (median(values) for values in zip(*ordered[:quarter], strict=True))
    long, long_s = (median(values) for values in zip(*ordered[-quarter:], strict=True))
    each_s = max(0.0, (long_s - short_s) / (long - short)) if long > short else 0.0
    return max(0.0, short_s - each_s * (short - fmean(call.rows for call in calls)))


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
