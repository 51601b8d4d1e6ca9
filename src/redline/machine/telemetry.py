"""Cheap readings while a run trains: the GPU's own counters through NVML, and the memory of this process. No
torch, no CUDA sync.

    telemetry = GpuTelemetry(0)
    telemetry.read()    # {'gpu_util': 0.97, 'memory_used_bytes': ..., 'power_w': ..., 'sm_clock_mhz': ..., ...}

A reading never raises: instruments must not end a run. What the board does not answer is left out.
"""

import os
from pathlib import Path

import psutil
import pynvml

from redline.machine.nvml import ask, visible_handles


class GpuTelemetry:
    """The counters of one visible GPU; every reading is empty if NVML is absent or does not list it."""

    def __init__(self, index: int) -> None:
        self._handle = None
        try:
            # held until the process ends: opening it anew for each reading would take milliseconds
            pynvml.nvmlInit()
            handles = visible_handles()
        except pynvml.NVMLError:
            return
        if 0 <= index < len(handles):
            self._handle = handles[index]

    def read(self) -> dict[str, float]:
        """One reading; `gpu_util` is the share of the driver's last sampling period (up to a second) with a
        kernel running."""
        if self._handle is None:
            return {}
        util = ask(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, self._handle)
        power_mw = ask(pynvml.nvmlDeviceGetPowerUsage, self._handle)
        readings = {
            "gpu_util": None if util is None else util.gpu / 100,
            "memory_used_bytes": None if memory is None else memory.used,
            "power_w": None if power_mw is None else power_mw / 1000,
            "sm_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM),
            "temperature_c": ask(pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in readings.items() if value is not None}


def process_rss_bytes() -> int:
    """Memory of this process that is in RAM."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return psutil.Process().memory_info().rss
