"""How groups end: with the process, whether it came to its end, raised an exception or was interrupted.

A signal whose default is to kill (SIGTERM) is left alone: the kernel closes everything, at once, even while torch waits
in C++, where no Python handler would run.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.join.group import Group

_open: list[Group] = []
_state = {"failed": False, "watching": False}


def watch(group: Group) -> None:
    """After the group has formed: torch puts a hook of its own around exceptions then, and ours has to be outside."""
    _open.append(group)
    if not _state["watching"]:
        _state["watching"] = True
        atexit.register(_at_exit)
    _hook()


def forget(group: Group) -> None:
    if group in _open:
        _open.remove(group)


def _hook() -> None:
    before = sys.excepthook

    def after_failure(*error: Any) -> None:
        _state["failed"] = True
        before(*error)

    sys.excepthook = after_failure


def _at_exit() -> None:
    if not _open:
        return
    keep_groups()
    for group in reversed([*_open]):
        group.close(failed=_state["failed"])


def keep_groups() -> None:
    """Never to be destructed: who lets go of a gloo group last waits for its threads, and has Python's lock as it does.

    Those may wait for ranks that do not come, or are not there at all in a fork. The end of the process ends them all.
    """
    from torch.distributed.distributed_c10d import _world

    for group in [*_world.pg_map]:
        keep(group)


def keep(thing: object) -> None:
    """Its destructor never runs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
