"""Restarts a forked worker as a fresh interpreter, if the imports before the fork do not match what it needs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import termios
import time
from typing import Any

from .. import log, paths
from ..child import setup
from ..probe import probe

_TIMEOUT = 2.0  # seconds to wait for an agent that does not read
_HOOK = os.path.join(paths.ROOT, paths.HOOK.rstrip("/"))


class FreshStart:
    """`FreshStart(spec, fds)(changed)`: report to the agent, and execute the worker's own command line in this
    process.

    The process keeps its pid, session and streams. A worker that has joined a group cannot do this.
    """

    def __init__(self, spec: setup.ChildSpec, fds: list[int]) -> None:
        self._spec = spec
        self._fds = fds  # of its probe: board, channel, stacks; empty: no probe
        self._pid = os.getpid()
        if fds:
            known = os.fstat(fds[0]).st_ino
            os.register_at_fork(after_in_child=lambda: _close(fds[0], known))
        self._cwd = os.getcwd()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def __call__(self, changed: dict[str, str | None]) -> None:
        """Restart. Returns if that is not possible: then the old values stay in effect, and a message says so."""
        if os.getpid() != self._pid:  # a child forked by the script keeps the modules of its parent
            return
        joined = _joined()
        for stream in () if joined else (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # a stream of the script's own may raise anything
                log.swallowed("forkserver.imports.restart")
        self._report({"is": "stale", "variables": changed, "late": joined})
        if joined:
            names = ", ".join(changed)
            os.write(2, f"phalanx: {names}: set after the import that reads it; use phalanx run --fresh\n".encode())
            return
        self._restore_process()
        spec = {**self._spec, "exec": self._spec["command"], "hook": _HOOK}
        if self._fds:
            setup.add_probe_hook(spec, self._fds)
        setup.execute(spec)

    def _report(self, message: dict[str, Any]) -> None:
        """Report to the agent, after it has read the output of this interpreter and before the next one writes."""
        if probe.current is None:
            return
        deadline = time.monotonic() + _TIMEOUT
        with contextlib.suppress(OSError):
            for fd in (1, 2):
                _until_empty(fd, termios.FIONREAD, deadline)
            probe.current.send(message)
            _until_empty(self._fds[1], termios.TIOCOUTQ, deadline)

    def _restore_process(self) -> None:
        """Restore state that survives an exec and that the script may have changed."""
        with contextlib.suppress(OSError):
            os.chdir(self._cwd)
        os.umask(self._umask)
        for number, handler in self._signals.items():
            if signal.getsignal(number) is signal.SIG_IGN and handler is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def _until_empty(fd: int, request: int, deadline: float) -> None:
    """Wait until the other side of a pipe or socket has read everything."""
    left = bytearray(4)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a terminal or a file: nothing to wait for
            fcntl.ioctl(fd, request, left)
        if not any(left):
            return
        time.sleep(0.001)


def _close(fd: int, known: int) -> None:
    """Close a descriptor in a child of the worker, if it is still the same file."""
    with contextlib.suppress(OSError):
        if os.fstat(fd).st_ino == known:
            os.close(fd)


def _joined() -> bool:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and bool(c10d.is_initialized())
