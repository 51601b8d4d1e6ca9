"""Redline trains language models at the limit of the GPU they run on, and proves it."""

__version__ = "0.1.0"
