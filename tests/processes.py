"""Waiting for processes that this one did not start, for as long as the test may take."""

import contextlib
import os
import time

import psutil


def wait_until_gone(pid: int) -> None:
    """Until the process has ended, with all its threads: the last one closes its files and frees its locks. Whoever
    inherits it may leave it a zombie, or take it away between two looks."""
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE or len(os.listdir(f"/proc/{pid}/task")) > 1:
            time.sleep(0.02)
