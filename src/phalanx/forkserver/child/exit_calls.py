"""Records where a script called `sys.exit`, `exit` or `quit` with an error: the exit code alone does not tell the line.

`raise SystemExit` and `os._exit` cannot be recorded.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import threading
import time
import traceback
from typing import Any

from .. import log

_latest: tuple[int, str, traceback.StackSummary, float] | None = None  # exit code, message, stack, time


def record(path: str) -> None:
    """Replace `sys.exit` by a function that records its caller. At exit, write the error file to `path`."""
    plain, pid = sys.exit, os.getpid()

    def exit(*status: Any) -> Any:  # noqa: A001
        if os.getpid() == pid and threading.current_thread() is threading.main_thread():
            _remember("sys.exit", status, sys._getframe(1), path)
        return plain(*status)

    exit.__module__, exit.__qualname__, exit.__doc__ = "sys", "exit", plain.__doc__
    sys.exit = exit
    _record_builtins(path, pid)
    atexit.register(_write, path, pid)


def _record_builtins(path: str, pid: int) -> None:
    """Make the functions `exit` and `quit` of the module `site` record their caller, too."""
    quitter = type(getattr(builtins, "exit", None))
    if quitter.__module__ != "_sitebuiltins":  # python -S, or a sitecustomize has replaced it
        return
    plain: Any = quitter.__call__

    def call(self: Any, *status: Any, **named: Any) -> Any:
        if os.getpid() == pid and threading.current_thread() is threading.main_thread():
            _remember(self.name, status or tuple(named.values()), sys._getframe(1), path)
        return plain(self, *status, **named)

    quitter.__call__ = call  # type: ignore[method-assign]


def _remember(function: str, status: tuple[Any, ...], frame: Any, path: str) -> None:
    global _latest
    value = status[0] if status else None
    if value is None or (isinstance(value, int) and value & 0xFF == 0):
        _latest = None
        return
    code = value & 0xFF if isinstance(value, int) else 1
    try:
        stack = traceback.extract_stack(frame)
        message = f"{function}({value:d})" if isinstance(value, int) else f"{function}: {value}"
        if frame.f_globals.get("__name__") == "argparse" and isinstance(frame.f_locals.get("message"), str):
            message = f"usage error: {frame.f_locals['message'].strip()}"
        _latest = code, message, stack, time.time()
        if not isinstance(value, int):  # Python prints it at the end, and the report about the failure contains it
            from . import error_file

            error_file.write_printed(path, f"{value}\n")
    except Exception:  # the message may be any object
        log.swallowed("forkserver.child.exit_calls")
        _latest = None


def _write(path: str, pid: int) -> None:
    if _latest is not None and os.getpid() == pid:
        from . import error_file

        error_file.write_exit(path, *_latest)
