"""What every test needs before torch multiplies its first matrices, and a clock that nobody has to wait for."""

import os
import tempfile
import time
from collections.abc import Iterator

import pytest

from redline.machine.cpu import avoid_broken_amx

avoid_broken_amx(os.environ)  # as the command line does

if "ATEN_CPU_CAPABILITY" in os.environ:  # of which torch.compile's cache knows nothing
    instructions = os.environ["ATEN_CPU_CAPABILITY"]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{instructions}")


@pytest.fixture
def double() -> Iterator[None]:
    from precision import in_double

    with in_double():
        yield


class Clock:
    """Time passes where somebody sleeps, and a microsecond at every reading; work takes none."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def read(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """This process's clocks and `time.sleep`, so that what is measured is what was slept, on any machine."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "monotonic", clock.read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock
