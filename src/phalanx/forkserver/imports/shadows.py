"""Modules in the script's folder with the name of a module that was imported before the script: resource.py, queue.py.

Plain Python would import the script's modules, because its folder is first in sys.path. So the earlier ones are
forgotten, and the script imports its own. Modules that have already imported them keep them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import all_suffixes
from types import ModuleType

from .. import hidden_modules
from .preload import modules

preimported: frozenset[str] = frozenset()  # imported by Python itself, before the script's folder is in sys.path


def unshadow(path0: str | None) -> bool:
    """Forget the modules that files in this folder, the first of sys.path, shadow. Return whether there were any."""
    if path0 is None or sys.flags.safe_path:
        return False
    kept = preimported.union(sys.builtin_module_names)
    found = [name for name in _modules_in(path0) if _imported(name) and name not in kept]
    shadowed = [name for name in found if not _is_in(hidden_modules.find(name), path0)]
    if not shadowed:
        return False
    # Import it now, with its own modules: it is needed when an exception ends the script.
    from ..child import error_file  # noqa: F401

    for name in [name for name in (*sys.modules, *hidden_modules.modules) if name.partition(".")[0] in shadowed]:
        sys.modules.pop(name, None)
        modules.forget(name)
    return True


def _modules_in(folder: str) -> Iterable[str]:
    suffixes = tuple(all_suffixes())
    try:
        entries = os.listdir(folder or ".")
    except OSError:  # a zip file, or a folder that cannot be listed
        return
    for entry in entries:
        if entry.endswith(suffixes):
            yield entry.partition(".")[0]
        elif _imported(entry) and os.path.exists(os.path.join(folder, entry, "__init__.py")):
            yield entry


def _imported(name: str) -> bool:
    return name in sys.modules or name in hidden_modules.modules


def _is_in(module: ModuleType | None, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file).startswith(os.path.join(os.path.realpath(folder), ""))
