"""Wake a GPU up while Python does something else. No torch.

    wake_gpu(0)          # returns at once
    import torch         # 1.6 s on the host of an H200

Starting the driver and making a context takes some 0.3 s in which Python need not wait: torch finds both done. What fails
here fails again in torch, which says why.
"""

import ctypes
import os
import threading


def wake_gpu(index: int) -> threading.Thread:
    """Wake this one of the visible GPUs. The thread is not a daemon: a program does not end in the middle of the driver's start."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does; the driver reads it when it starts
    thread = threading.Thread(target=_wake, args=(index,))
    thread.start()
    return thread


def _wake(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        # never released: it is the context that torch will use, and it ends with the process
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
