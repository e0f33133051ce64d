"""Modules of the script's folder that have the name of one that was imported before the script: resource.py, queue.py.

Plain Python would find the script's, because its folder comes first in sys.path. So the others are forgotten, and the
script imports its own; whoever has imported them already keeps them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import all_suffixes
from types import ModuleType

plain: frozenset[str] = frozenset()  # imported by Python itself, before the script's folder is in sys.path


def uncover(path0: str | None) -> bool:
    """Forget what the modules in this folder, the first of sys.path, stand before. True: there was something."""
    if path0 is None or sys.flags.safe_path:
        return False
    kept = plain.union(sys.builtin_module_names)
    found = [name for name in _modules_in(path0) if name in sys.modules and name not in kept]
    covered = [name for name in found if not _lies_in(sys.modules[name], path0)]
    if covered:
        from ..child import error_file  # noqa: F401  # with its own modules: it is needed when an exception ends the script
    for name in [name for name in sys.modules if name.partition(".")[0] in covered]:
        del sys.modules[name]
    return bool(covered)


def _modules_in(folder: str) -> Iterable[str]:
    suffixes = tuple(all_suffixes())
    try:
        entries = os.listdir(folder or ".")
    except OSError:  # a zip file, or a folder that cannot be listed
        return
    for entry in entries:
        if entry.endswith(suffixes):
            yield entry.partition(".")[0]
        elif entry in sys.modules and os.path.exists(os.path.join(folder, entry, "__init__.py")):
            yield entry


def _lies_in(module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file).startswith(os.path.join(os.path.realpath(folder), ""))
