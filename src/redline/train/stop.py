"""Ctrl-C, SIGTERM and SIGUSR1 (SLURM's, before the time limit) as a request to stop after the current step."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOPPED = "stopped by signal"
STDERR, SOON = 2, b"\nstopping once the work in progress is saved; press Ctrl-C again to stop at once\n"


class StopTraining(Exception):
    """A source has no more batches, for the reason given: the run ends in order, with a checkpoint."""


@contextmanager
def stop_on_signal(request: Callable[[], None]) -> Iterator[None]:
    """The first signal calls `request` and tells a terminal, as an update may take minutes; a second interrupts."""

    def handle(number: int, _frame: Any) -> None:
        request()
        if number == signal.SIGINT and os.isatty(STDERR):
            os.write(STDERR, SOON)  # not print: the signal may have come inside another one
        signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)

    def interrupt(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a third one would interrupt the unwinding
        raise KeyboardInterrupt

    with handled_by(handle, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        yield


@contextmanager
def handled_by(handle: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Call `handle` for these signals instead of what would happen."""
    before = {}
    with suppress(ValueError):  # not the main thread: whoever runs the loop there handles signals
        for number in numbers:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
