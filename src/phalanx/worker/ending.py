"""Closes process groups with the process, whether it ends normally, by an exception or by Ctrl-C.

Signals that kill by default (SIGTERM) are not handled: the kernel closes everything at once, even while torch waits in
C++, where no Python handler would run.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import traceback
from typing import Any, Protocol

from phalanx.forkserver import log


class OpenGroup(Protocol):
    """A group that must be closed."""

    pid: int

    def close(self, *, failed: bool = False) -> None:
        """Close the group; after a failure without waiting for other ranks."""
        ...


_open: list[OpenGroup] = []
_state: dict[str, Any] = {"failed": False, "interrupted": False, "watching": False, "hook": None}


def watch(group: OpenGroup) -> None:
    """Close the group when the process ends. Call it after the group has formed: torch then sets sys.excepthook, and
    ours must wrap it.
    """
    _open.append(group)
    if not _state["watching"]:
        _state["watching"] = True
        atexit.register(_at_exit)
    _hook()


def forget(group: OpenGroup) -> None:
    """Stop closing the group at exit."""
    if group in _open:
        _open.remove(group)


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception is a failure, not a plain `sys.exit()`."""
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def is_interrupted() -> bool:
    """Return whether Ctrl-C ends the process: by the exception that is handled now, or that has ended the script."""
    return _state["interrupted"] or isinstance(sys.exc_info()[1], KeyboardInterrupt)


def _hook() -> None:
    before = sys.excepthook
    if before is _state["hook"]:
        return

    def after_failure(*error: Any) -> None:
        _state["failed"] = True
        _state["interrupted"] = isinstance(error[1], KeyboardInterrupt)
        before(*error)

    sys.excepthook = _state["hook"] = after_failure


def _at_exit() -> None:
    if not _open:
        return
    keep_groups()
    for group in reversed([*_open]):
        if group.pid == os.getpid():  # a fork does not close the groups of its parent
            _close(group)


def _close(group: OpenGroup) -> None:
    try:
        group.close(failed=_state["failed"])
    except Exception:
        # At interpreter exit Python would ignore the exception, and exit with 0.
        traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # at interpreter exit: a stream may be closed, or of any type
                log.swallowed("worker.ending")
        os._exit(1)


def keep_groups() -> None:
    """Never destroy the groups of this process: the destructor of a gloo group joins its threads with the GIL held.

    They may wait for ranks that do not arrive, and do not exist in a fork. They end with the process.
    """
    from torch.distributed.distributed_c10d import _world

    for group in [*_world.pg_map]:
        keep(group)


def keep(thing: object) -> None:
    """Keep an object alive forever, so that its destructor never runs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
