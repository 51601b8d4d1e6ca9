"""Notices a phase of a step that hangs, names it, and ends the run: with a checkpoint where the weights are whole.

    with Watchdog(event, alone=process.world_size == 1) as watchdog:
        watchdog.phase("generate"); ...; watchdog.phase("update"); ...; watchdog.phase(None)

A phase hangs when it takes FACTOR times as long as it usually does (the median so far), and at least LEAST_S; the
first of its kind, which may compile, has FIRST_S. While answers are drawn or scored the weights are whole, so the run
stops in order (`StopTraining`). In an update they may not be, and on several processes the others wait in a
collective: there it ends with an error, and resumes from the last checkpoint.
"""

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any, Self

from redline.errors import TrainingError
from redline.record.units import format_duration
from redline.train.stop import StopTraining

FACTOR = 10.0
LEAST_S = 300.0
FIRST_S = 3600.0
BREAK_IN = signal.SIGUSR2
"""SIGUSR1 is SLURM's, and stops a run after the step that hangs here."""
DRAWING = ("generate", "reward")
"""Phases of the source, which leave the weights alone."""


class Watchdog:
    def __init__(
        self,
        event: Callable[..., None],
        *,
        alone: bool,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = 5.0,
    ) -> None:
        self._event, self._alone, self._clock, self._poll_s = event, alone, clock, poll_s
        self._took_s: dict[str, list[float]] = defaultdict(list)
        self._now: tuple[str, float] | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._hung: tuple[tuple[str, float], str] | None = None
        self._before: Any = None
        self._thread = threading.Thread(target=self._watch, name="redline-watchdog", daemon=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there can a signal interrupt
            self._before = signal.signal(BREAK_IN, self._break_in)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._before is not None:
            self._thread.join()  # the signal without its handler would end the process
            signal.signal(BREAK_IN, self._before)

    def phase(self, name: str | None) -> None:
        """The phase before ends, and this one begins."""
        with self._lock:
            if self._now is not None:
                self._took_s[self._now[0]].append(self._clock() - self._now[1])
            self._now = (name, self._clock()) if name is not None else None

    def check(self) -> str | None:
        """The phase that hangs now, if one does; returned only once."""
        with self._lock:
            if self._now is None or self._hung is not None:
                return None
            (name, began_s), took_s = self._now, self._took_s[self._now[0]]
            spent_s, usual_s = self._clock() - began_s, median(took_s) if took_s else None
            if spent_s < (FIRST_S if usual_s is None else max(LEAST_S, FACTOR * usual_s)):
                return None
            usually = "the first time" if usual_s is None else f"usually {format_duration(usual_s)}"
            self._hung = self._now, f"the phase {name} hung: {format_duration(spent_s)}, {usually}"
        self._event("phase_hung", phase=name, spent_s=round(spent_s, 1), usual_s=usual_s)
        return name

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_s):
            self.check()
            # At every look: a signal that comes just before the main thread begins to wait does not wake it.
            if self._hung is not None and self._hung[0] is self._now:
                signal.pthread_kill(threading.main_thread().ident or 0, BREAK_IN)

    def _break_in(self, _number: int, _frame: FrameType | None) -> None:
        if self._now is None or self._hung is None or self._hung[0] is not self._now or self._closed.is_set():
            return  # it ended while the signal was on its way
        (name, _), said = self._hung
        self._now = None  # once: what follows must not be interrupted
        if self._alone and name in DRAWING:
            raise StopTraining(said)
        raise TrainingError(f"{said}; run the same command again and it resumes from the last checkpoint")
