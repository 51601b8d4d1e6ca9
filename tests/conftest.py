"""What holds for every test, on every machine: instructions that the CPU has, examples that are always the same,
a clock that nobody has to wait for."""

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from ceilings import save_ceilings
from hypothesis import HealthCheck, settings

from redline.machine.cpu import avoid_broken_amx
from redline.machine.facts import read_facts

avoid_broken_amx(os.environ)  # as the command line does

# What torch compiles is kept from one run of the tests to the next; its key knows nothing of ATEN_CPU_CAPABILITY.
instructions = os.environ.get("ATEN_CPU_CAPABILITY", "")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{instructions}")

# Files of tests that run side by side each start a Ray. Without a token of its own, each would write one into the home
# folder, and replace the one that another has just read. Here, because Ray reads this when it is first imported.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
# It would kill workers when something else fills the machine's memory.
os.environ.update(RAY_memory_monitor_refresh_ms="0")
# Its workers are nice (15) to other processes: beside busy ones on few cores they would wait for minutes.
os.environ.update(RAY_worker_niceness="0")


# Property-based tests: `make test` runs a few examples, always the same, in whatever time they take; `make fuzz`
# runs many random ones.
_PATIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("test", max_examples=20, derandomize=True, database=None, **_PATIENT)
settings.register_profile("fuzz", max_examples=1000, **_PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the user's cache, and without a GPU none measures this machine, which takes seconds."""
    folder = tmp_path_factory.mktemp("own-cache")
    if not read_facts().gpus:
        save_ceilings(folder)
    with patch.dict("os.environ", REDLINE_CACHE=str(folder)):
        yield


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
