"""What a worker need not take apart at its end: it was made before the fork, and the process is gone afterwards."""

from __future__ import annotations

import ctypes
import sys
import weakref


def keep_operators() -> None:
    """Once, after the imports. torch takes back every operator it has registered when a process ends.

    That is a quarter of the time that a worker needs to end, on pages that it has to copy first.
    """
    library = sys.modules.get("torch.library")
    registered = getattr(library, "_del_library", None)
    # A library of operators that a script registers is not here yet, and is taken back as ever.
    for finalizer, info in list(getattr(weakref.finalize, "_registry", {}).items()):
        if registered is not None and info.func is registered:
            finalizer.atexit = False
            for kept in info.args:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
