"""Modules that were imported before the fork, and are not in `sys.modules` until the script imports them.

`imports/preloaded.py` hides them. Code that runs before the script finds them here: `hidden_modules.find("torch")`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

modules: dict[str, ModuleType] = {}
_waiting: dict[str, Callable[[], None]] = {}


def find(name: str) -> Any:
    """Return a module that is imported, hidden or not; None if there is none."""
    return modules[name] if name in modules else sys.modules.get(name)


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` when the script has imported this hidden module."""
    _waiting[name] = then


def forget(name: str) -> bool:
    """Let an import find another module of this name. Return whether there was one."""
    _waiting.pop(name, None)
    return modules.pop(name, None) is not None


def call_waiting() -> None:
    """Call the functions that wait for modules which have reappeared."""
    for name in [name for name in _waiting if name not in modules]:
        _waiting.pop(name)()
