"""What a worker need not undo at exit: it was made before the fork, and the process is gone afterwards."""

from __future__ import annotations

import ctypes
import sys
import weakref


def keep_operators() -> None:
    """Keep torch from unregistering, at exit, the operators that its own imports have registered from Python.

    Operators that a script registers later are unregistered as usual.
    """
    registered = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer, info in list(getattr(weakref.finalize, "_registry", {}).items()):
        if registered is not None and info.func is registered:
            finalizer.atexit = False
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(info.args))
