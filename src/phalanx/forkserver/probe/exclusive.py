"""Calls that need a process with one thread: the probe thread ends before them and starts again afterwards.

The kernel rejects unshare(CLONE_NEWUSER) and setns for a process with two threads. A seccomp filter may kill the
process for calls of the thread, or for starting it, so the thread does not start again after one. Calls through ctypes
and the os module are intercepted here; calls of an extension module are not.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Away = Literal["", "during", "permanently"]

_AWAY: Mapping[str, Away] = {
    "unshare": "during",
    "setns": "during",
    "seccomp": "permanently",
    "seccomp_load": "permanently",  # of libseccomp
}
_BY_ARGUMENT = ("prctl", "syscall")
_PR_SET_SECCOMP = 22
_SYSTEM_CALLS = {
    "x86_64": {272: "unshare", 308: "setns", 317: "seccomp"},
    "aarch64": {97: "unshare", 268: "setns", 277: "seccomp"},
}


def away(name: str, arguments: Sequence[Any], machine: str) -> Away:
    """Return whether the thread must not exist while `name` is called with these arguments, or from then on."""
    if name in _BY_ARGUMENT:
        number = getattr(arguments[0], "value", arguments[0]) if arguments else None
        calls = {_PR_SET_SECCOMP: "seccomp"} if name == "prctl" else _SYSTEM_CALLS.get(machine, {})
        name = calls.get(number, "") if isinstance(number, int) else ""
    return _AWAY.get(name, "")


def install(stop: Callable[[], None], start: Callable[[], None], end: Callable[[], None]) -> None:
    """Install the hooks: call `stop` before and `start` after such calls, or `end`."""
    machine = platform.machine()

    def call(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        match away(name, arguments, machine):
            case "permanently":
                end()
            case "during":
                stop()
                try:
                    return function(*arguments, **named)
                finally:
                    start()
        return function(*arguments, **named)

    _in_ctypes(call)
    for name in ("unshare", "setns"):  # from Python 3.12 on
        plain = getattr(os, name, None)
        if plain is not None:
            setattr(os, name, functools.wraps(plain)(functools.partial(call, name, plain)))


def _in_ctypes(call: Callable[..., Any]) -> None:
    plain = ctypes.CDLL.__getitem__

    @functools.wraps(plain)
    def get(library: ctypes.CDLL, name: Any) -> Any:
        function: Any = plain(library, name)
        if name not in _AWAY and name not in _BY_ARGUMENT:
            return function
        kind: Any = type(function)

        def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
            return call(name, functools.partial(kind.__call__, self), *arguments, **named)

        parts = {"_flags_": kind._flags_, "_restype_": kind._restype_, "__call__": guarded}
        found = type(kind)(kind.__name__, (kind,), parts)((name, library))
        found.__name__ = name
        return found

    ctypes.CDLL.__getitem__ = get  # type: ignore[method-assign]
