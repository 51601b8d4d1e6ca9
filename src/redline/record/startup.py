"""Where the time from the command to the first update goes. No torch.

    with watched():             # the command runs: Python and its own imports are behind
        mark("plan")            # the plan was made
        parts = taken()         # once, after the first update: {"python_s": 0.4, "plan_s": 0.1, ..., "total_s": 6.2}

It is about the process, so its state belongs to the process. Outside of a command (a library call) there is nothing to
tell, and marks cost nothing.
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

_MARKS: list[tuple[str, float]] = []


@contextmanager
def watched() -> Iterator[None]:
    now_s = time.monotonic()
    _MARKS[:] = [("", now_s - _age_s()), ("python", now_s)]
    try:
        yield
    finally:
        _MARKS.clear()


def mark(part: str) -> None:
    """A part of the start-up ends here."""
    if _MARKS:
        _MARKS.append((part, time.monotonic()))


def underway() -> bool:
    return bool(_MARKS)


def taken() -> dict[str, float]:
    """Seconds of every part, and in all; ends the start-up."""
    parts: dict[str, float] = {}
    for (_, before_s), (part, after_s) in pairwise(_MARKS):
        parts[f"{part}_s"] = round(parts.get(f"{part}_s", 0.0) + after_s - before_s, 3)
    parts["total_s"] = round(_MARKS[-1][1] - _MARKS[0][1], 3)
    _MARKS.clear()
    return parts


@contextmanager
def importing() -> Iterator[None]:
    """Wraps large imports. What they make lives on, but Python's collector looks through it again and again: a fifth of
    the time of `import torch`."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _age_s() -> float:
    """How long this process has been running; 0 where the system does not say."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return 0.0
