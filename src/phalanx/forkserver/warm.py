"""A fork server that is kept between runs: waits on a Unix socket, and forks one fork server per run.

    warm ──fork── fork server of run A ──fork── workers
         └─fork── fork server of run B ──fork── workers

The fork server of a run behaves like a cold one: it ends with its agent, and ends its workers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from . import hidden_modules, linux, paths, wire
from .child import teardown
from .imports import preload
from .orphans import Orphans
from .probe import probe
from .server import ForkServer

_STORE = f"{__package__}.store.host"  # modules that a store would otherwise import after the fork, while workers start
_REQUEST_LIMIT = 1 << 20  # bytes
_QUEUE = 16  # connections that wait


class WarmForkServer:
    """Serves runs: WarmForkServer(listener, path, idle).serve(modules) imports the modules, then serves."""

    def __init__(self, listener: socket.socket, path: str, idle: float) -> None:
        self._listener = listener
        self._path = path  # of the socket, removed at the end
        self._idle = idle
        self._used = time.monotonic()
        self._runs: set[int] = set()
        self._orphan_cleanup = Orphans()
        self._left_running: frozenset[int] = frozenset()  # processes that runs have left running on purpose
        self._files: dict[str, tuple[int, int]] = {}

    def serve(self, modules: list[str]) -> dict[str, Any]:
        """Serve until there was no request for `idle` seconds. Returns the spec in a worker only."""
        self._listener.listen(_QUEUE)  # callers see this process as their peer, not the one that started it
        probe.prepare()
        report = preload.preload([*modules, _STORE], [*paths.TRAINING], None)
        teardown.keep_operators()
        linux.adopt_orphans()
        self._files = _module_files()
        preload.modules.hide()
        self._used = time.monotonic()  # its own imports do not count as idle time
        if report["failed"] or report["unsafe"]:
            sys.stderr.write(f"cannot be kept warm: {report}\n")
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
                request = self._handle_connection(connection, (wake_read, wake_write))
                if request is not None:
                    return request

    def _handle_connection(self, connection: socket.socket, pipes: tuple[int, int]) -> dict[str, Any] | None:
        """Handle one connection: a request for a fork server, for the status, or to quit."""
        with connection:
            if not linux.peer(connection).is_same_user:
                return None
            connection.settimeout(2)
            try:
                received = wire.receive(connection, _REQUEST_LIMIT)
            except (OSError, ValueError):
                return None
            if received is None:
                return None
            request = received[0]
            connection.settimeout(None)
            with contextlib.suppress(OSError):
                match request.get("do"):
                    case "hello":
                        return self._start_run(connection, request, pipes)
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

    def _start_run(
        self, connection: socket.socket, request: dict[str, Any], pipes: tuple[int, int]
    ) -> dict[str, Any] | None:
        missing = [name for name in request["required"] if hidden_modules.find(name) is None]
        stale = next((path for path, known in self._files.items() if _stamp(path) != known), None)
        if missing or stale:
            why = f"{stale} has changed" if stale else f"{missing[0]} is not imported"
            wire.send(connection, {"is": "refused", "why": why})
            if stale:
                self._idle = 0.0  # no longer needed
            return None
        self._idle = max(self._idle, request.get("keep", 0.0))
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
            self._left_running -= {pid}
            if pid in self._runs:
                self._runs.discard(pid)
                self._used = time.monotonic()
                ended, killed = True, killed or status != 0
        # If the fork server of a run was killed, or was asked to leave processes running (`--linger forever`), this
        # process adopts what its workers had started. In the second case it keeps running.
        if killed:
            self._orphan_cleanup.end(besides=frozenset(self._runs) | self._left_running)
        elif ended:
            self._left_running = self._orphan_cleanup.leave(besides=frozenset(self._runs))

    def _quit(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os._exit(0)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


def _module_files() -> dict[str, tuple[int, int]]:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {path: _stamp(path) for path in files if path}
