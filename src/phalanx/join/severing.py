"""Cut what a group is held together by, so that whoever waits in one of its collectives stops waiting.

gloo has no way to abort an operation that waits for a peer which neither answers nor closes. It gives up at once when a
connection ends; so the connections that came to be while the group was formed are ended. They stay open as descriptors:
gloo closes them itself, when the group is destroyed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


class Severing:
    """with severing.watching(): dist.init_process_group(…); later, from any thread: severing.cut()"""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}  # the socket's own name -> descriptor
        self._before: dict[str, int] | None = None  # while a group is being formed
        self._pid = os.getpid()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._before = _sockets()
        try:
            yield
        finally:
            self._found = self._all()
            self._before = None

    def cut(self) -> None:
        if os.getpid() != self._pid:
            return
        for name, fd in self._all().items():
            with contextlib.suppress(OSError):
                copy = os.dup(fd)  # what it refers to stays the same while we look
                try:
                    if os.readlink(f"/proc/self/fd/{copy}") == name:
                        _end(copy)
                finally:
                    os.close(copy)

    def _all(self) -> dict[str, int]:
        before = self._before
        if before is None:
            return self._found
        return {**self._found, **{name: fd for name, fd in _sockets().items() if name not in before}}

    def forget(self) -> None:
        self._found = {}


def _end(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    try:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.getpeername()  # not one that listens: gloo ends the process when it can accept nobody
            # Not for writing: gloo's thread may just be about to answer a peer that was ready to receive, and when that
            # write fails it forgets the operation, for which somebody then waits until the timeout.
            sock.shutdown(socket.SHUT_RD)
    finally:
        sock.detach()


def _sockets() -> dict[str, int]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found[name] = int(fd)
    return found
