"""Cut what groups are held together by, so that whoever waits in one of their collectives stops waiting.

gloo has no way to abort an operation that waits for a peer which neither answers nor closes. It gives up at once when a
connection ends; so the connections that came to be while a group was formed are ended. They stay open as descriptors:
gloo closes them itself, when the group is destroyed. NCCL can abort, and so can groups of shared memory: they are told.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.forkserver import paths
from phalanx.worker.process_group import nccl


class GroupAborter:
    """with severing.watching(): dist.init_process_group(…); later, from any thread: severing.cut()"""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}  # the socket's own name -> descriptor
        self._before: list[dict[str, int]] = []  # while groups are being formed
        self._pid = os.getpid()
        nccl.prepare()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        before = _sockets()
        self._before.append(before)
        try:
            yield
        finally:
            self._found = self._all()
            self._before.remove(before)

    def watch_groups(self) -> Callable[[], None]:
        """Those that a script makes itself, too: dist.new_group, device meshes. Returns what ends it."""
        from torch.distributed import distributed_c10d as c10d

        theirs = c10d._new_process_group_helper

        def ours(*args: Any, **options: Any) -> Any:
            with self.watching():
                return theirs(*args, **options)

        def end() -> None:
            c10d._new_process_group_helper = theirs

        c10d._new_process_group_helper = ours
        return end

    def cut(self) -> None:
        if os.getpid() == self._pid:
            _abort_ours()  # first: or they ask a store that has just been cut off, about which torch makes a noise
            self.disconnect()
            nccl.abort()

    def disconnect(self) -> None:
        """What was watched alone: NCCL knows nothing of that, and is left alone."""
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
        found = dict(self._found)
        for before in [*self._before]:
            found |= {name: fd for name, fd in _sockets().items() if name not in before}
        return found

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


def _abort_ours() -> None:
    """Those that are being made, too: they wait in memory, and for no socket."""
    if (living := sys.modules.get(paths.GROUPS)) is not None:
        living.abort()
