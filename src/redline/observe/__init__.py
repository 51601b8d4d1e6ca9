"""Instruments and diagnosis for a user's own PyTorch loop (`watch`) or Hugging Face's Trainer (`RedlineCallback`).

    with redline.watch("runs/mine", model=model) as run: ...
    Trainer(..., callbacks=[RedlineCallback("runs/mine")])

They write a run folder like our own, so `redline report`, `diagnose` and `watch` read it (docs/api.md).
"""

import importlib
from typing import Any

from redline.observe.run import WatchedRun, watch

__all__ = ["RedlineCallback", "WatchedRun", "watch"]


def __getattr__(name: str) -> Any:
    """Import the callback on demand: its base class needs transformers."""
    if name == "RedlineCallback":
        return importlib.import_module("redline.observe.trainer").RedlineCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
