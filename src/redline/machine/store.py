"""Measured ceilings as data, and their cache: one JSON file for each kind of machine. No torch; ceilings.py
does the measuring.

    ceilings = cached(read_facts())    # None when this machine has not been measured yet

The file is read strictly: a broken one, or one in another layout, counts as absent, and the user is told why.
What was measured on a busy machine (`noisy`) holds for an hour, and what a run beats is dropped.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

from redline.config.load import build
from redline.errors import ConfigError, DataError, Say
from redline.machine.facts import MachineFacts, machine_key
from redline.record.files import cache_folder, read_json, storage_errors, write_atomic

NOISY = 0.15
"""Spread from which a limit is measured again later: an H200's blocks differ by up to 7%, a busy CPU's by any factor."""
NOISY_FOR_S = 3600.0
"""How long they hold nevertheless: measuring at every start would cost more than it tells."""


@dataclass(frozen=True, kw_only=True)
class MatmulPoint:
    """One matrix product on the GPU: (m, k) times (k, n)."""

    dtype: str
    m: int
    n: int
    k: int
    tflops: float
    """Rate of the best block."""
    spread: float
    """How much slower the median block was than the best, as a share of the best."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best that this machine was seen to do. The GPU's values are None on a machine without one."""

    measured_at: str
    """ISO time, UTC."""
    device: str
    """The GPU measured, or `cpu`."""
    matmul: tuple[MatmulPoint, ...]
    copy_bytes_per_s: float | None
    """Within GPU memory, bytes read and bytes written both counted."""
    host_to_device_bytes_per_s: float | None
    """From pinned memory."""
    device_to_host_bytes_per_s: float | None
    launch_latency_s: float | None
    """Time per tiny kernel when torch queues many."""
    graph_launch_latency_s: float | None
    """The same, replayed in a CUDA graph."""
    cpu_threads: int
    cpu_matmul_gflops: float
    """fp32 with all of torch's threads."""
    cpu_copy_bytes_per_s: float
    """Within host memory, read and written both counted."""
    spread: dict[str, float]
    """The spread of everything else, by name; or, if larger, the share of the best block lost to other programs."""
    notes: tuple[str, ...]
    """What was skipped or rejected, and why."""

    @property
    def noisy(self) -> tuple[str, ...]:
        """The limits that cannot be trusted, in words. On a machine with a GPU its host's rates do not matter."""
        rising = sorted(self.matmul, key=lambda point: point.tflops)
        best = {f"matmul {point.dtype}": point.spread for point in rising}
        spread = best | {name: s for name, s in self.spread.items() if name.startswith("GPU") or not best}
        return tuple(f"{name} varied by {share:.0%}" for name, share in spread.items() if share > NOISY)

    def matmul_tflops(self, dtype: str) -> float | None:
        """The GPU's best measured rate for bf16, fp16, tf32, fp32 or fp8; None if it has no such arithmetic."""
        return max((point.tflops for point in self.matmul if point.dtype == dtype), default=None)


def cached(facts: MachineFacts, progress: Say | None = None) -> Ceilings | None:
    """The ceilings kept for this kind of machine; None when there are none, or none that can be used."""
    path = cache_path(facts)
    if not path.exists():
        return None
    try:
        found = build(Ceilings, read_json(path, dict), where="ceilings")
        return None if found.noisy and time.time() - path.stat().st_mtime > NOISY_FOR_S else found
    except (DataError, ConfigError) as error:
        if progress is not None:
            progress(f"the ceilings kept in {path} cannot be used and will be measured again: {error}")
        return None


def save(facts: MachineFacts, ceilings: Ceilings) -> None:
    path = cache_path(facts)
    with storage_errors("the measured ceilings", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(dataclasses.asdict(ceilings), indent=1) + "\n")


def forget_if_beaten(facts: MachineFacts, share: float, say: Say) -> None:
    """Drop the ceilings if a run beats the measured matmul rate: the machine was busy when that was measured."""
    if share > 1 and (path := cache_path(facts)).exists():
        with storage_errors("the measured ceilings", path.parent):
            path.unlink(missing_ok=True)
        say(
            f"the run reached {share:.0%} of the matmul rate measured for this machine, so that rate was measured"
            " too low: it will be measured again"
        )


def cache_path(facts: MachineFacts) -> Path:
    return cache_folder() / "machine" / f"{machine_key(facts)}.json"
