"""Where a loop makes the host wait for the GPU: one update is run with torch's own detector on, and each wait
is noted with its line.

    waits = SyncWatch()                     # on a GPU, between two updates
    ...                                     # one update
    waits.stop()                            # ['train.py:42', 'train.py:42']

Only one update, because the detector takes over Python's warnings meanwhile; those of others are given on.
Left out: waits inside CUDA libraries and in torch.cuda.synchronize(), which the detector does not see, and
CPUs, which have nothing to wait for.
"""

import warnings
from pathlib import Path

import torch

SYNCHRONISING, NOTICE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype"
"""What the detector says of a wait; and of itself, once, which is nothing for the user."""


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
        seen = self._seen or []
        for other in (
            w for w in seen if not any(words in str(w.message) for words in (SYNCHRONISING, NOTICE))
        ):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        return [f"{Path(w.filename).name}:{w.lineno}" for w in seen if SYNCHRONISING in str(w.message)]
