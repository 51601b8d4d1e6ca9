"""Redline trains language models at the limit of the GPU they run on, and proves it."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Make `redline.watch` on first use: `import redline` loads no torch, and no room below depends
    on the one it lives in."""
    if name == "watch":
        return importlib.import_module("redline.observe").watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
