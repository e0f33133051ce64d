"""What a worker need not free at its end: it was made before the fork, is inert, and the process is gone afterwards.

To free it a worker has to copy the pages that it lies in. Modules are cleared, objects destroyed and destructors called
as ever, in the same order; the one exception is what a script has made an attribute of an imported function.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from types import FunctionType

_PLAIN = (type(None), bool, int, float, str, bytes, type, FunctionType)


def keep_what_was_imported() -> None:
    """Once, after the imports."""
    _keep_operators()
    _keep_functions()


def _keep_operators() -> None:
    """torch takes back every operator it has registered from Python when a process ends.

    A library of operators that a script registers is not here yet, and is taken back as ever.
    """
    registered = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer, info in list(getattr(weakref.finalize, "_registry", {}).items()):
        if registered is not None and info.func is registered:
            finalizer.atexit = False
            _keep(info.args)


def _keep_functions() -> None:
    """Functions of modules, which hold nothing but their code; of others, their code."""
    modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    functions = {id(value): value for names in modules for value in list(names.values()) if type(value) is FunctionType}
    _keep([value if _holds_nothing(value) else value.__code__ for value in functions.values()])


def _holds_nothing(function: FunctionType) -> bool:
    """Neither in its closure nor in an argument's default: there a script's objects may come to lie."""
    if function.__closure__ is not None or function.__kwdefaults__ is not None:
        return False
    return function.__defaults__ is None or all(type(value) in _PLAIN for value in function.__defaults__)


def _keep(held: object) -> None:
    """For good."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
