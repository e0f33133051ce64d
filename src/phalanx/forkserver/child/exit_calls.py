"""Remembers where a script called `sys.exit` with an error: an exit code alone does not say which line gave up.

`raise SystemExit` and `os._exit` cannot be seen.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from typing import Any

from .. import log

_latest: tuple[int, str, traceback.StackSummary, float] | None = None  # exit code, message, stack, time


def record(path: str) -> None:
    """Replace `sys.exit` by a function that remembers its caller. At exit, the error file is written to `path`."""
    plain, pid = sys.exit, os.getpid()

    def exit(*status: Any) -> Any:  # noqa: A001
        if os.getpid() == pid and threading.current_thread() is threading.main_thread():
            _remember(status, sys._getframe(1))
        return plain(*status)

    exit.__module__, exit.__qualname__, exit.__doc__ = "sys", "exit", plain.__doc__
    sys.exit = exit
    atexit.register(_write, path, pid)


def _remember(status: tuple[Any, ...], frame: Any) -> None:
    global _latest
    value = status[0] if status else None
    if value is None or (isinstance(value, int) and value & 0xFF == 0):
        _latest = None
        return
    code = value & 0xFF if isinstance(value, int) else 1
    try:
        stack = traceback.extract_stack(frame)
        message = f"sys.exit({value:d})" if isinstance(value, int) else f"sys.exit: {value}"
        if frame.f_globals.get("__name__") == "argparse" and isinstance(frame.f_locals.get("message"), str):
            message = f"usage error: {frame.f_locals['message'].strip()}"
        _latest = code, message, stack, time.time()
    except Exception:  # the message may be any object
        log.swallowed("forkserver.child.exit_calls")
        _latest = None


def _write(path: str, pid: int) -> None:
    if _latest is not None and os.getpid() == pid:
        from . import error_file

        error_file.write_exit(path, *_latest)
