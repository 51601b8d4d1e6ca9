"""Waiting for processes that this one did not start, for as long as the test may take."""

import contextlib
import time

import psutil


def wait_until_gone(pid: int) -> None:
    """Until the process has ended. Whoever inherits it may leave it a zombie, or take it away between two looks."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
