"""A fork server that outlives its run: waits on a Unix socket, and forks a fork server of its own for every run.

    warm ──fork── fork server of run A ──fork── workers
         └─fork── fork server of run B ──fork── workers

The one in between belongs to its run as a cold one would: it ends with its agent and takes its workers along.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

from . import linux, wire
from .child import teardown
from .imports import preload
from .orphans import Orphans
from .probe import probe
from .server import ForkServer


class WarmForkServer:
    def __init__(self, listener: socket.socket, path: str, idle: float) -> None:
        self._listener = listener
        self._path = path  # of the socket, removed at the end
        self._idle = idle
        self._used = time.monotonic()
        self._runs: set[int] = set()
        self._leftovers = Orphans()
        self._left: frozenset[int] = frozenset()  # what runs have left running on purpose
        self._files: dict[str, tuple[int, int]] = {}

    def serve(self, modules: list[str]) -> dict[str, Any]:
        """Until nobody has asked for `idle` seconds. Returns the order only in a worker."""
        probe.prepare()
        report = preload.preload(modules, [], None)
        teardown.keep_operators()
        linux.adopt_orphans()
        self._files = _module_files()
        self._used = time.monotonic()  # its own imports are no idle time
        if report["failed"] or report["unsafe"]:
            sys.stderr.write(f"not fit to be kept warm: {report}\n")
            self._quit()
        signal.signal(signal.SIGTERM, lambda *_: self._quit())
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            self._reap()
            left = self._used + self._idle - time.monotonic()
            if left <= 0 and not self._runs:
                self._quit()
            ready = {fd for fd, _ in poll.poll(max(50, int(left * 1000)) if not self._runs else None)}
            if wake_read in ready:
                os.read(wake_read, 512)
            if self._listener.fileno() in ready:
                connection, _ = self._listener.accept()
                order = self._greet(connection, (wake_read, wake_write))
                if order is not None:
                    return order

    def _greet(self, connection: socket.socket, pipes: tuple[int, int]) -> dict[str, Any] | None:
        """One visitor: asks for a fork server, for news, or for the end."""
        with connection:
            if not _same_user(connection):
                return None
            connection.settimeout(2)
            try:
                received = wire.receive(connection)
            except (OSError, ValueError):
                return None
            if received is None:
                return None
            order = received[0]
            connection.settimeout(None)
            with contextlib.suppress(OSError):
                match order.get("do"):
                    case "hello":
                        return self._welcome(connection, order, pipes)
                    case "status":
                        wire.send(
                            connection, {"is": "warm", "pid": os.getpid(), "runs": len(self._runs), "idle": self._idle}
                        )
                    case "quit":
                        self._idle = 0.0
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(self._path)
                        wire.send(connection, {"is": "quitting", "runs": len(self._runs)})
                        if not self._runs:
                            self._quit()
        return None

    def _welcome(
        self, connection: socket.socket, order: dict[str, Any], pipes: tuple[int, int]
    ) -> dict[str, Any] | None:
        missing = [name for name in order["required"] if name not in sys.modules]
        stale = next((path for path, known in self._files.items() if _stamp(path) != known), None)
        if missing or stale:
            why = f"{stale} has changed" if stale else f"{missing[0]} is not imported"
            wire.send(connection, {"is": "refused", "why": why})
            if stale:
                self._idle = 0.0  # of no use to anybody any more
            return None
        self._idle = max(self._idle, order.get("keep", 0.0))
        self._used = time.monotonic()
        pid = os.fork()
        if pid:
            self._runs.add(pid)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._listener.close()
        for fd in pipes:
            os.close(fd)
        os.setsid()
        sock = connection.dup()
        connection.close()
        wire.send(sock, {"is": "ready", "pid": os.getpid(), "seconds": {}, "failed": {}, "unsafe": ""})
        return ForkServer(sock).serve()

    def _reap(self) -> None:
        ended = killed = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._left -= {pid}
            if pid in self._runs:
                self._runs.discard(pid)
                self._used = time.monotonic()
                ended, killed = True, killed or status != 0
        # A run's fork server that was killed leaves what its workers had started to us; so does one that was told to
        # (`--linger forever`), and then it goes on.
        if killed:
            self._leftovers.end(besides=frozenset(self._runs) | self._left)
        elif ended:
            self._left = self._leftovers.leave(besides=frozenset(self._runs))

    def _quit(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os._exit(0)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


def _module_files() -> dict[str, tuple[int, int]]:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {path: _stamp(path) for path in files if path}
