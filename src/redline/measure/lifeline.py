"""The start of a trial's process: it makes sure to end when its parent does, and only then imports torch, which
takes seconds. No torch here.

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
"""How often to look for the parent on systems without such a signal."""


def end_with(parent: int) -> None:
    """End this process, whatever it is doing, when its parent ends or is killed, or if it has ended already."""
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
    os.killpg(0, signal.SIGKILL)  # this child has its own group


def main() -> None:
    end_with(int(sys.argv[1]))
    from redline.measure.child import serve

    serve()


if __name__ == "__main__":
    main()
