"""Creates the CUDA context of a worker that replaces one which used a GPU.

That takes about 0.4 s. It starts with the process and runs while the script is imported.
"""

from __future__ import annotations

import _thread
import ctypes


def open_context(device: int) -> None:
    """Create the context in a thread. An error here is ignored: it is raised again when the script uses the device."""
    _thread.start_new_thread(_open, (device,))


def _open(device: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), device) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)  # the context that torch uses
