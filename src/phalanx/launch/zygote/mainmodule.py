"""What Python does to run its main module, for a worker whose interpreter was started before the script was known."""

from __future__ import annotations

import builtins
import ctypes
import functools
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any

from . import kernel


def prepare(order: dict[str, Any]) -> Callable[[], object]:
    """Everything that comes before the first line of the script; calling the result is that line.

    The result is called by the module at the bottom of the stack, so that one frame is all that a script sees of us.
    """
    kind, target = order["main"]
    _set_command_line(order["command"])
    main = _fresh_main()
    match kind:
        case "module":
            sys.argv[:] = ["-m", *order["args"]]
            _first_on_path(os.getcwd())
            return functools.partial(runpy._run_module_as_main, target)  # type: ignore[attr-defined]
        case "path":
            sys.argv[:] = order["args"]
            _first_on_path("")
            return functools.partial(runpy.run_path, target, run_name="__main__")
    sys.argv[:] = [target, *order["args"]]
    real = os.path.realpath(target)
    if os.path.isdir(real) or zipfile.is_zipfile(real):
        _first_on_path(target)
        return functools.partial(runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]
    _first_on_path(os.path.dirname(real))
    path = os.path.abspath(target)
    main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
    main.__loader__ = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    return functools.partial(exec, code, main.__dict__)


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def _first_on_path(entry: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, entry)


def _set_command_line(command: list[str]) -> None:
    """What `ps` shows. The kernel reads it from where it laid the arguments when the process was started."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in command) + b"\0"
    if start and end > start:
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)
        kernel.end_command_line(min(start + len(text), end))
