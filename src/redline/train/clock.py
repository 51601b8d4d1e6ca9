"""Moments and the seconds between them: on the GPU's own clock, read later, or on the host's if there is no GPU.

    clock = Clock(device)
    begin, end = clock.now(), clock.now()      # on a GPU: two events in its queue; the host does not wait
    clock.passed(end), clock.seconds(begin, end)

A GPU reaches a moment when the work queued before it is done. Two moments around a wait of the host therefore measure
how long the GPU was idle: nothing if it still had work. Other accelerators are timed by the host's clock.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

Moment = torch.cuda.Event | float


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.now: Callable[[], Moment] = (
            partial(_event, torch.cuda.current_stream(device)) if self.is_gpu else time.perf_counter
        )

    def passed(self, moment: Moment) -> bool:
        """Whether the device has reached it; never waits."""
        return isinstance(moment, float) or moment.query()

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Waits until `end` has passed."""
        if isinstance(begin, float):
            assert isinstance(end, float), "moments of one clock"
            return end - begin
        assert not isinstance(end, float), "moments of one clock"
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
