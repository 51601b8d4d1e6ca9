"""The NVIDIA management library: which GPUs this process may see, without torch and without a CUDA context.

NVML numbers GPUs by PCI bus. So does CUDA, except on machines with different GPUs, where it puts the fastest
first; set CUDA_DEVICE_ORDER=PCI_BUS_ID there.
"""

import os
from collections.abc import Callable
from typing import Any

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
