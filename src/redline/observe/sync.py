"""Where a loop makes the host wait for the GPU: one update runs with torch's detector on, which names each line.

    waits = SyncWatch()                     # on a GPU, between two updates
    ...                                     # one update
    waits.stop()                            # ['train.py:42', 'train.py:42']

Only one update, because the detector takes over Python's warnings meanwhile; other warnings are passed on. The
detector does not see waits inside CUDA libraries or in torch.cuda.synchronize().
"""

import warnings
from pathlib import Path

import torch

SYNCHRONISING, NOTICE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype"
"""The detector's warning about a wait, and its notice about itself."""


class SyncWatch:
    def __init__(self) -> None:
        self._before = torch.cuda.get_sync_debug_mode()
        self._caught = warnings.catch_warnings(record=True)
        self._seen = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def look_away(self) -> None:
        torch.cuda.set_sync_debug_mode(self._before)

    def look_again(self) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> list[str]:
        """File and line of every wait."""
        torch.cuda.set_sync_debug_mode(self._before)
        self._caught.__exit__(None, None, None)
        places = []
        for seen in self._seen or []:
            if SYNCHRONISING in str(seen.message):
                places.append(f"{Path(seen.filename).name}:{seen.lineno}")
            elif NOTICE not in str(seen.message):
                warnings.warn_explicit(seen.message, seen.category, seen.filename, seen.lineno)
        return places
