"""A forked worker that starts again as a fresh interpreter: what was imported before the fork is not what it needs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import termios
import time
from typing import Any

from .. import paths
from ..child import setup
from ..probe import probe

_PATIENCE = 2.0  # for an agent that does not read
_HOOK = os.path.join(paths.ROOT, paths.HOOK.rstrip("/"))


class FreshStart:
    """`FreshStart(order, fds)(changed)`: tell the agent, and execute the worker's own command line in this process.

    The process keeps its pid, session and streams. Only a worker that has not joined a group yet can do this.
    """

    def __init__(self, order: setup.ChildSpec, fds: list[int]) -> None:
        self._order = order
        self._fds = fds  # of its probe: board, channel, stacks; empty: it has none
        self._pid = os.getpid()
        if fds:
            known = os.fstat(fds[0]).st_ino
            os.register_at_fork(after_in_child=lambda: _close(fds[0], known))
        self._cwd = os.getcwd()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def __call__(self, changed: dict[str, str | None]) -> None:
        """Returns where it cannot be done: then the old values count, and that is said."""
        if os.getpid() != self._pid:  # a child that the script has forked: it goes on with what its parent has
            return
        joined = _joined()
        for stream in () if joined else (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._say({"is": "stale", "variables": changed, "late": joined})
        if joined:
            names = ", ".join(changed)
            os.write(2, f"phalanx: {names}: set after the import that reads it; use phalanx run --fresh\n".encode())
            return
        self._as_before()
        order = {**self._order, "exec": self._order["command"], "hook": _HOOK}
        if self._fds:
            setup.hook(order, self._fds)
        setup.execute(order)

    def _say(self, message: dict[str, Any]) -> None:
        """Between what this interpreter has written and what the next one writes: the agent has read both."""
        if probe.current is None:
            return
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(OSError):
            for fd in (1, 2):
                _until_empty(fd, termios.FIONREAD, until)
            probe.current.say(message)
            _until_empty(self._fds[1], termios.TIOCOUTQ, until)

    def _as_before(self) -> None:
        """What a process keeps when it executes a program, and the script may have changed."""
        with contextlib.suppress(OSError):
            os.chdir(self._cwd)
        os.umask(self._umask)
        for number, handler in self._signals.items():
            if signal.getsignal(number) is signal.SIG_IGN and handler is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def _until_empty(fd: int, request: int, until: float) -> None:
    """Of a pipe, or a socket: until the other side has read everything."""
    left = bytearray(4)
    while time.monotonic() < until:
        with contextlib.suppress(OSError):  # a terminal or a file: nothing to wait for
            fcntl.ioctl(fd, request, left)
        if not any(left):
            return
        time.sleep(0.001)


def _close(fd: int, known: int) -> None:
    """In a child of the worker, which has no use for it, if it is still what it was."""
    with contextlib.suppress(OSError):
        if os.fstat(fd).st_ino == known:
            os.close(fd)


def _joined() -> bool:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and bool(c10d.is_initialized())
