"""The NVIDIA management library, without torch and without a CUDA context: which GPUs this process may see, and their
counters while a run trains.

    telemetry = GpuTelemetry(0)
    telemetry.read()    # {'gpu_util': 0.97, 'memory_used_bytes': ..., 'power_w': ..., 'sm_clock_mhz': ..., ...}

A reading never raises: instruments must not end a run. NVML numbers GPUs by PCI bus. So does CUDA, except on machines
with different GPUs, where it puts the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID there.
"""

import os
from collections.abc import Callable
from typing import Any

import psutil
import pynvml


def visible_handles() -> list[Any]:
    """Handles of the GPUs that CUDA shows to this process, in CUDA's order. NVML must be initialised."""
    count = pynvml.nvmlDeviceGetCount()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    named: list[str] = []
    for entry in map(str.strip, chosen.split(",")):
        uuid = _uuid(entry, count)
        if uuid is None:
            # CUDA ignores what follows the first entry that names no GPU, which is how "-1" hides them all
            break
        named.append(uuid)
    if len(set(named)) < len(named):
        return []  # CUDA shows nothing when a GPU is named twice
    return [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in named]


def _uuid(entry: str, count: int) -> str | None:
    """The full UUID that an entry of CUDA_VISIBLE_DEVICES (an index, a UUID, or the start of one) names."""
    if entry.startswith("MIG-"):
        return entry
    uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < count else None
    matching = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def ask(query: Callable[..., Any], *arguments: Any) -> Any:
    """The answer to one query, or None where this board or driver does not support it."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


class GpuTelemetry:
    """The counters of one visible GPU; every reading is empty if NVML is absent or does not list it."""

    def __init__(self, index: int) -> None:
        self._handle, self._energy_before_j = None, 0.0
        try:
            # held until the process ends: reopening it for each reading would take milliseconds
            pynvml.nvmlInit()
            handles = visible_handles()
        except pynvml.NVMLError:
            return
        if 0 <= index < len(handles):
            self._handle = handles[index]
            self._energy_before_j = self._energy_j() or 0.0

    def _energy_j(self) -> float | None:
        """Energy since this object was made: the board counts from the day its driver was loaded."""
        counted_mj = ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if counted_mj is None else counted_mj / 1000 - self._energy_before_j

    def read(self) -> dict[str, float]:
        """One reading; `gpu_util` is the share of the last sampling period (up to a second) with a kernel running."""
        if self._handle is None:
            return {}
        util = ask(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, self._handle)
        power_mw = ask(pynvml.nvmlDeviceGetPowerUsage, self._handle)
        readings = {
            "gpu_util": None if util is None else util.gpu / 100,
            "memory_used_bytes": None if memory is None else memory.used,
            "energy_j": self._energy_j(),
            "power_w": None if power_mw is None else power_mw / 1000,
            "sm_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM),
            "temperature_c": ask(pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in readings.items() if value is not None}


def process_rss_bytes() -> int:
    """Memory of this process that is in RAM."""
    return psutil.Process().memory_info().rss
