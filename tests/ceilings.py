"""What this machine can do, made up: for tests that must not stop to measure it."""

from pathlib import Path
from unittest.mock import patch

from redline.machine.facts import read_facts
from redline.machine.store import Ceilings, save


def save_ceilings(cache: Path) -> None:
    """Keep ceilings for this machine in a cache folder."""
    gpu = ("copy", "host_to_device", "device_to_host")
    ceilings = Ceilings(
        measured_at="2026-01-01T00:00:00+00:00", device="cpu", matmul=(), cpu_threads=1, cpu_matmul_gflops=50.0,
        cpu_copy_bytes_per_s=1e10, launch_latency_s=None, graph_launch_latency_s=None, spread={}, notes=(),
        **dict.fromkeys(f"{name}_bytes_per_s" for name in gpu),
    )  # fmt: skip
    with patch.dict("os.environ", REDLINE_CACHE=str(cache)):
        save(read_facts(), ceilings)
