"""The end of a forked worker: the script's objects are finalized as in plain Python.

At exit, Python collects all remaining objects and calls each finalizer once, while all names still exist: files are
flushed and closed, and `__del__` runs. In a forked worker the modules imported before the fork are frozen
(`gc.freeze`), so the collector does not see them. Objects that are reachable only from frozen ones, such as a handler
of `logging`, would never be finalized. Collecting frozen objects too would take half a second per rank.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType, ModuleType
from typing import Any

from .. import log, thread_frames

_MAX_OBJECTS = 10_000  # objects that a stream or a thread may refer to

# Files may be layered. A GzipFile, for example, is none of these.
_DEPTHS = {io.TextIOBase: 1, io.BufferedReader: 3, io.BufferedWriter: 3, io.BufferedRandom: 3, io.RawIOBase: 4}

_after: Callable[[], None] | None = None  # None: not a forked worker


def begin(after: Callable[[], None]) -> None:
    """Prepare a worker, just before its script. `after` is called after the last finalizer."""
    global _after
    _after = after
    gc.freeze()  # existing objects do not belong to the script
    main = sys.modules["__main__"]
    for one in (main, vars(main)):  # except these: the collector must find them
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(one))
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(one))


def finalize() -> None:
    """Finalize the script's objects. Must run last at exit, so it must be registered first."""
    if _after is None:
        return
    gc.collect()  # as Python does; afterwards the objects are in the collector's order
    depths: dict[type, int] = {}
    found: list[Any] = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in depths:
            depths[kind] = _depth(kind)
        if depths[kind] >= 0:
            found.append(one)
    found.sort(key=lambda one: depths[type(one)])
    in_use = _in_use()
    call = ctypes.pythonapi.PyObject_CallFinalizer
    call.argtypes, call.restype = (ctypes.py_object,), None
    for one in found:
        if id(one) not in in_use:
            call(one)
    _after()
    if _nanobind_loaded():
        _silence_stderr()


def _nanobind_loaded() -> bool:
    """Return whether an extension uses nanobind, as triton does since torch 2.15.

    At exit, nanobind prints every type and function that still exists, as a bug of the extension. Here they exist on
    purpose: modules that were imported before the fork are not cleared.
    """
    api = ctypes.pythonapi
    state, of_state = api.PyInterpreterState_Get, api.PyInterpreterState_GetDict
    state.restype = of_state.restype = ctypes.c_void_p  # a borrowed reference: with py_object, it would be released
    of_state.argtypes = (ctypes.c_void_p,)
    known = ctypes.cast(of_state(state()), ctypes.py_object).value
    return any(str(name).startswith("__nb_internals") for name in known)


def _silence_stderr() -> None:
    """Redirect stderr to /dev/null. Every finalizer of the script has run; only code in C may still print."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the script
        sys.stderr.flush()
    with contextlib.suppress(OSError), open(os.devnull, "wb", buffering=0) as nothing:
        os.dup2(nothing.fileno(), 2)


def _depth(kind: type) -> int:
    """Return the order of finalization: files last, and the innermost file last of all. The collector's order may close
    a file before its buffer.

    Negative: nothing to finalize.
    """
    try:
        if not hasattr(kind, "__del__"):
            return -1
        return next(
            (depth for file, depth in _DEPTHS.items() if issubclass(kind, file)), 2 * issubclass(kind, io.IOBase)
        )
    except Exception:  # a metaclass may raise anything
        log.swallowed("forkserver.child.finalization")
        return -1


def _in_use() -> set[int]:
    """Return the ids of objects that Python keeps to the very end: standard streams, and objects that running threads
    use.
    """
    held = [value for name, value in [*vars(sys).items(), *vars(builtins).items()] if not name.startswith("last_")]
    roots: list[Any] = [getattr(sys, name, None) for name in ("stdin", "stdout", "stderr")]
    with thread_frames.reading():
        for thread, innermost in sys._current_frames().items():
            frame: FrameType | None = innermost
            while frame is not None and thread != threading.get_ident():
                roots += frame.f_locals.values()
                frame = frame.f_back
    return _reachable(roots) | _reachable(held)


def _reachable(roots: Iterable[Any]) -> set[int]:
    """Return the ids of all objects reachable from `roots`, except through the names of modules."""
    names = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    found: set[int] = set()
    waiting = list(roots)
    while waiting and len(found) < _MAX_OBJECTS:
        one = waiting.pop()
        if id(one) in found or id(one) in names or isinstance(one, ModuleType | FunctionType | type):
            continue
        found.add(id(one))
        waiting += gc.get_referents(one)
    return found
