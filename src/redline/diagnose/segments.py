"""Several runs in one log: a file that was written on, a job that was started again, a counter that starts
again each epoch.

Mixed together their steps mean nothing: a stall every ten updates of one falls between those of the other. So
a log is split where its step goes back, and the longest part is read.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def runs_of(rows: Sequence[T], step_of: Callable[[T], int]) -> list[list[T]]:
    """The rows of each run. A row with the step of the one before it is the same again (a second handler,
    another process): one stays."""
    runs: list[list[T]] = []
    for row in rows:
        if not runs or step_of(row) < step_of(runs[-1][-1]):
            runs.append([row])
        elif step_of(row) > step_of(runs[-1][-1]):
            runs[-1].append(row)
    return runs


def longest(runs: Sequence[list[T]]) -> list[T]:
    """The run with the most rows; of several the last. Empty where there is none."""
    return max(reversed(runs), key=len, default=[])


def told(count: int, first: int, last: int) -> tuple[str, ...]:
    """What is said of it among the repairs."""
    return (
        (f"{count} runs in this log; the longest, steps {first:,} to {last:,}, is read",) if count > 1 else ()
    )
