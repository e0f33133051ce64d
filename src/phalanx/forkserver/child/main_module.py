"""Runs the main module as Python does, in a worker whose interpreter was started before the script was known."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import marshal
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from typing import Any

from . import kept_texts

_HEADER = 16  # bytes of a .pyc before its code


def prepare(spec: dict[str, Any]) -> Callable[[], object]:
    """Do everything that precedes the first line of the script. Call the result to run the script.

    The module at the bottom of the stack calls it, so that a script sees only one frame of phalanx.
    """
    kind, target = spec["main"]
    main = _fresh_main()
    match kind:
        case "module":
            sys.argv[:] = ["-m", *spec["args"]]
            if spec["path0"] is not None:  # None: a module of phalanx
                _first_on_path(os.getcwd())
            return functools.partial(runpy._run_module_as_main, target)  # type: ignore[attr-defined]
        case "path":
            sys.argv[:] = spec["args"]
            _first_on_path("")
            return functools.partial(runpy.run_path, target, run_name="__main__")
        case "stdin":
            sys.argv[:] = ["-", *spec["args"]]
            _first_on_path("")
            main.__loader__ = BuiltinImporter
            return functools.partial(exec, _standard_input(main), main.__dict__)
    sys.argv[:] = [target, *spec["args"]]
    real = os.path.realpath(target)
    path = target if os.path.isabs(target) else f"{os.getcwd()}/{target}"  # joined, not normalized: as Python does
    if os.path.isdir(real) or zipfile.is_zipfile(real):
        _first_on_path(path)
        return functools.partial(runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]
    _first_on_path(os.path.dirname(real))
    return functools.partial(exec, _file(main, path), main.__dict__)


def _file(main: types.ModuleType, path: str) -> types.CodeType:
    text = kept_texts.text_of(path)
    if text is None:
        with open(path, "rb") as file:
            text = file.read()
    return code_of(main, path, text)


def code_of(main: types.ModuleType, path: str, text: bytes) -> types.CodeType:
    """Compile the content of a file. Python recognizes compiled files by their first bytes, whatever their name."""
    main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
    if path.endswith(".pyc") or text.startswith(importlib.util.MAGIC_NUMBER[:2]):
        if not text.startswith(importlib.util.MAGIC_NUMBER):
            raise RuntimeError("Bad magic number in .pyc file")
        main.__loader__ = SourcelessFileLoader("__main__", path)
        return marshal.loads(text[_HEADER:])  # type: ignore[no-any-return]  # noqa: S302
    main.__loader__ = SourceFileLoader("__main__", path)
    return compile(text, path, "exec", dont_inherit=True)


def _standard_input(main: types.ModuleType) -> types.CodeType:
    main.__file__, main.__cached__ = "<stdin>", None  # type: ignore[attr-defined]
    with open(0, "rb", closefd=False) as file:
        return compile(file.read(), "<stdin>", "exec", dont_inherit=True)


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # the name multiprocessing uses, by which children send its classes
        sys.modules["__mp_main__"] = main
    return main


def _first_on_path(entry: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, entry)
