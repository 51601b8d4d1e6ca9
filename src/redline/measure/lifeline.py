"""The process of a trial, before anything else: it ends when its parent does. Only then torch is imported,
which takes seconds. No torch.

python -m redline.measure.lifeline PARENT      # then child.py reads requests
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
"""Linux: send me a signal when the thread that started me ends."""
LOOK_EVERY_S = 1.0
"""Where there is no such signal: how often the parent is looked for."""


def end_with(parent: int) -> None:
    """End, whatever this process is doing, when its parent does, killed or not; at once if that has happened
    already."""
    if not _signalled_when_parent_ends():
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _signalled_when_parent_ends() -> bool:
    try:
        return ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) == 0
    except (AttributeError, OSError):  # not Linux
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os.killpg(0, signal.SIGKILL)  # the group is this child's own


def main() -> None:
    end_with(int(sys.argv[1]))
    from redline.measure.child import serve

    serve()


if __name__ == "__main__":
    main()
