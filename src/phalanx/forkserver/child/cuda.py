"""A CUDA context for a worker that takes the place of one which used a GPU.

To create one takes about 0.4 s. It begins when the process does, and goes on while the script is imported.
"""

from __future__ import annotations

import _thread
import ctypes


def open_context(device: int) -> None:
    """In a thread. What fails here fails again, and is told, when the script uses the device."""
    _thread.start_new_thread(_open, (device,))


def _open(device: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), device) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)  # the one that torch uses
