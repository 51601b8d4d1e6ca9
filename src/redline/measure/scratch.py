"""Folders for what trials write and nobody keeps. They belong to the parent, which removes them even if the child
was killed. No torch.

    scratch = Scratch()
    environment[SCRATCH] = str(scratch.path)
    scratch.close()

If the parent was killed too, the next one that needs a folder removes those that nobody has locked any more. TMPDIR
would not do: compilers keep their results there for the next process.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

SCRATCH = "REDLINE_TRIAL_FOLDER"
"""The environment variable that tells a child."""
PREFIX = "redline-trial-"
FRESH_S = 60.0
"""A folder younger than this may not have been locked yet."""


class Scratch:
    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_if_left(folder)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # a process that is being killed may still write
        os.close(self._lock)


def _remove_if_left(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, or gone
        return
    try:
        if time.time() - os.fstat(lock).st_mtime > FRESH_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # in use
        pass
    finally:
        os.close(lock)
