"""Runs a worker with the script and modules that its run began with, if the files on disk have changed since.

The agent sends the text of files that differ. A worker without changed files does not use this module.
"""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from ..child import main_module, setup
from ..child.kept_texts import text_of, texts


def install(spec: dict[str, Any]) -> None:
    """Use the texts of the worker's spec instead of the files. Call it before the script's first line."""
    texts.update((path, text.encode("latin-1")) for path, text in spec["kept"].items())
    for path, text in texts.items():
        lines = text.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[path] = (len(text), None, lines, path)  # None: never compared with the file
    sys.meta_path.insert(0, _Finder())
    target = os.path.realpath(spec["command"][2]) if len(spec["command"]) > 2 else ""
    if target in texts and "main" not in spec:
        _run_in_place_of(spec["command"][2], target, spec.get("path0"))


def install_from(fd: int) -> None:
    """Do the same in an executed interpreter, with a spec in JSON from this descriptor."""
    with open(fd, "rb") as file:
        file.seek(0)
        install(json.load(file))


def _run_in_place_of(given: str, real: str, path0: str | None) -> None:
    """Run the kept text when Python is about to open its main script.

    Python raises an audit event there, at the bottom of the stack and with sys.path complete. An exception from the
    hook ends the interpreter in the usual way: SystemExit with its code, any other exception with a traceback and exit
    code 1.
    """

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event != "cpython.run_file" or real not in texts:
            return
        text = texts.pop(real)
        if path0 is not None and not sys.flags.safe_path and sys.path:
            sys.path[0] = path0  # Python may have failed to resolve a script that was deleted
        main = sys.modules["__main__"]
        path = given if os.path.isabs(given) else f"{os.getcwd()}/{given}"
        linecache.cache[path] = linecache.cache[real]
        exec(main_module.code_of(main, path, text), main.__dict__)  # noqa: S102
        raise SystemExit(0)

    setup.hide_frames_of(globals())
    sys.addaudithook(hook)


class _Finder:
    """Finds modules whose files have changed, by the paths of the files."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return a spec with the kept text, if the module would be loaded from one of the files."""
        del target
        tail = name.rpartition(".")[2]
        for entry in sys.path if path is None else path:
            stem = os.path.join(entry or os.getcwd(), tail)
            for file, folder in ((os.path.join(stem, "__init__.py"), [stem]), (f"{stem}.py", None)):
                if os.path.realpath(file) in texts:
                    loader = _Loader(name, file)
                    return importlib.util.spec_from_file_location(
                        name, file, loader=loader, submodule_search_locations=folder
                    )
            if os.path.exists(f"{stem}.py") or os.path.isdir(stem):
                return None  # a later entry of sys.path, which the import does not reach
        return None


class _Loader(SourceFileLoader):
    """Loads a module from the kept text, and caches nothing."""

    def get_data(self, path: str) -> bytes:
        """Return the kept text."""
        text = text_of(path)
        return text if text is not None else super().get_data(path)

    def path_stats(self, path: str) -> dict[str, Any]:
        """Raise OSError: no compiled file belongs to this text."""
        raise OSError(f"{path} has changed")
