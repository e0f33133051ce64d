"""What Python does to run its main module, for a worker whose interpreter was started before the script was known."""

from __future__ import annotations

import builtins
import functools
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any


def prepare(order: dict[str, Any]) -> Callable[[], object]:
    """Everything that comes before the first line of the script; calling the result is that line.

    The result is called by the module at the bottom of the stack, so that one frame is all that a script sees of us.
    """
    kind, target = order["main"]
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
    path = target if os.path.isabs(target) else f"{os.getcwd()}/{target}"  # joined, not tidied: as Python does
    main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
    main.__loader__ = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    return functools.partial(exec, code, main.__dict__)


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's other name for it, by which children send its classes
        sys.modules["__mp_main__"] = main
    return main


def _first_on_path(entry: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, entry)
