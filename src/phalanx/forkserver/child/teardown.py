"""What a worker need not take back at its end: it was made before the fork, and the process is gone afterwards."""

from __future__ import annotations

import ctypes
import sys
import weakref


def keep_operators() -> None:
    """torch takes back every operator it has registered from Python when a process ends: not those of its own imports.

    A library of operators that a script registers is not here yet, and is taken back as ever.
    """
    registered = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer, info in list(getattr(weakref.finalize, "_registry", {}).items()):
        if registered is not None and info.func is registered:
            finalizer.atexit = False
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(info.args))
