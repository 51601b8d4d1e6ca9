"""Fixtures of the whole-pipeline tests: the warm process, the nano corpus and recipe, all made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ceilings import save_ceilings
from pipeline import Nano
from warm import Warm


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of every command: the corpus is tokenised once for all tests, and no test measures
    ceilings."""
    folder = tmp_path_factory.mktemp("cache")
    save_ceilings(folder)
    return folder


@pytest.fixture(scope="session")
def warm(cache: Path) -> Iterator[Warm]:
    # One thread: as fast at this size, and the tests share few cores with each other and with whoever else is
    # there.
    with Warm({"REDLINE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}) as warm:
        yield warm


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two cores of a Ray that is started here: without one, a command would join whatever runs on this machine."""
    ray = pytest.importorskip("ray")
    small = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 80 * 2**20}
    ray.init("local", num_cpus=2, **small)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def nano(warm: Warm, cache: Path) -> Nano:
    return Nano(warm, cache)
