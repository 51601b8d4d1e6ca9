"""A training in a part of the GPU's memory, so that a device of 24 or 40 GiB can be played on a
larger one."""

from typing import Any

import torch

from redline.measure.training import TrainingSubject


class Limited(TrainingSubject):
    """`memory_limit_bytes` of the setting is all that torch's allocator may take; beyond it, it runs out of
    memory."""

    def __init__(self, setting: dict[str, Any]) -> None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting["memory_limit_bytes"] / total_bytes))
        super().__init__(setting)
