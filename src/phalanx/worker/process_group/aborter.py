"""Aborts process groups, so that no thread keeps waiting in one of their collectives.

gloo cannot abort an operation that waits for a peer which neither answers nor closes. It gives up at once when a
connection ends, so the connections that were made while a group formed are shut down. Their descriptors stay open: gloo
closes them when the group is destroyed. NCCL and groups of shared memory can abort.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.forkserver import paths
from phalanx.worker.process_group import nccl


class GroupAborter:
    """Finds the connections of process groups, and cuts them.

    with aborter.watching():
        dist.init_process_group(…)
    aborter.cut()       # later, from any thread
    """

    def __init__(self) -> None:
        self._found: dict[str, int] = {}  # name of a socket -> descriptor
        self._before: list[dict[str, int]] = []  # while groups are being formed
        self._pid = os.getpid()
        self._cutting = threading.Lock()
        self._unwatch: Callable[[], None] = lambda: None
        nccl.prepare()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for connections that are made within this context."""
        before = _sockets()
        self._before.append(before)
        try:
            yield
        finally:
            self._found = self._all()
            self._before.remove(before)

    def watch_groups(self) -> None:
        """Also watch groups that the script creates, until `end_watching`: dist.new_group, device meshes."""
        from torch.distributed import distributed_c10d as c10d

        theirs = c10d._new_process_group_helper

        def ours(*args: Any, **options: Any) -> Any:
            with self.watching():
                return theirs(*args, **options)

        def end() -> None:
            c10d._new_process_group_helper = theirs

        c10d._new_process_group_helper = ours
        self._unwatch = end

    def end_watching(self) -> None:
        """Do not watch groups that the script creates any more."""
        self._unwatch()

    def cut(self) -> None:
        """Abort all groups of this process: shared memory, gloo and NCCL."""
        if os.getpid() == self._pid:
            _abort_ours()  # first: they would query a store that was just cut off, and torch would print errors
            self.disconnect()
            nccl.abort()

    def cut_if(self, is_lost: Callable[[], bool]) -> None:
        """Cut if the current group is lost. It does not become another one meanwhile (`uncut`)."""
        with self._cutting:
            if is_lost():
                self.cut()

    @contextlib.contextmanager
    def uncut(self) -> Iterator[None]:
        """Let no `cut_if` run in this context, in which the next group becomes the current one."""
        with self._cutting:
            yield

    def disconnect(self) -> None:
        """Shut down the watched connections only. NCCL is not aborted."""
        if os.getpid() != self._pid:
            return
        for name, fd in self._all().items():
            with contextlib.suppress(OSError):
                copy = os.dup(fd)  # refers to the same socket, whatever happens to fd
                try:
                    if os.readlink(f"/proc/self/fd/{copy}") == name:
                        _end(copy)
                finally:
                    os.close(copy)

    def _all(self) -> dict[str, int]:
        found = dict(self._found)
        for before in [*self._before]:
            found |= {name: fd for name, fd in _sockets().items() if name not in before}
        return found

    def forget(self) -> None:
        """Drop the connections that were found: their group is left."""
        self._found = {}


def _end(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    try:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.getpeername()  # raises for a listening socket, which must stay open: otherwise gloo ends the process
            # Not for writing: gloo's thread may be about to answer a peer that is ready to receive. If that fails, gloo
            # drops the operation, and its caller waits until the timeout.
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


def _abort_ours() -> None:
    """Abort groups of shared memory, also those being created: they do not wait for a socket."""
    if (registry := sys.modules.get(paths.GROUPS)) is not None:
        registry.abort()
