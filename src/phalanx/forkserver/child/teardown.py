"""Skips teardown work at exit for objects that were created before the fork: the process ends anyway."""

from __future__ import annotations

import ctypes
import sys
import weakref


def keep_operators() -> None:
    """Prevent torch from unregistering, at exit, the operators that its own imports registered from Python.

    Operators that a script registers later are unregistered as usual.
    """
    registered = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer, info in list(getattr(weakref.finalize, "_registry", {}).items()):
        if registered is not None and info.func is registered:
            finalizer.atexit = False
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(info.args))
