"""How groups end: with the process, whether it came to its end, raised an exception or was interrupted.

A signal whose default is to kill (SIGTERM) is left alone: the kernel closes everything, at once, even while torch waits
in C++, where no Python handler would run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import traceback
from typing import Any, Protocol


class OpenGroup(Protocol):
    pid: int

    def close(self, *, failed: bool = False) -> None: ...


_open: list[OpenGroup] = []
_state: dict[str, Any] = {"failed": False, "watching": False, "hook": None}


def watch(group: OpenGroup) -> None:
    """After the group has formed: torch puts a hook of its own around exceptions then, and ours has to be outside."""
    _open.append(group)
    if not _state["watching"]:
        _state["watching"] = True
        atexit.register(_at_exit)
    _hook()


def forget(group: OpenGroup) -> None:
    if group in _open:
        _open.remove(group)


def is_failure(error: BaseException | None) -> bool:
    """Whether an exception that ends a run is more than a plain `sys.exit()`."""
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def _hook() -> None:
    before = sys.excepthook
    if before is _state["hook"]:
        return

    def after_failure(*error: Any) -> None:
        _state["failed"] = True
        before(*error)

    sys.excepthook = _state["hook"] = after_failure


def _at_exit() -> None:
    if not _open:
        return
    keep_groups()
    for group in reversed([*_open]):
        if group.pid == os.getpid():  # what a fork has of its parent's is not the fork's to close
            _close(group)


def _close(group: OpenGroup) -> None:
    try:
        group.close(failed=_state["failed"])
    except Exception:
        # Python would note that it is ignored, and call it a success.
        traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


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
