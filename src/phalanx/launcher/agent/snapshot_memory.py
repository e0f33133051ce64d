"""Memory that outlives the workers of a node: they write snapshots of their state to it, and read them after a restart.

Each memory is a memfd: it has no name, and is freed when this process and all workers that use it have ended.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from phalanx.contract import encoding, shared_memory
from phalanx.contract.messages import snapshot_messages
from phalanx.launcher.ipc.packet_server import PacketServer
from phalanx.launcher.telemetry import out_of_memory

_REQUESTED_SHARE = 0.9  # share of the free memory, if the user requested snapshots
_DEFAULT_SHARE = 0.25  # otherwise
_MOST = 4096  # memories at most


class SnapshotMemory:
    """Lends memory to the workers of this node, within the limit."""

    def __init__(
        self, is_worker: Callable[[int], bool], *, requested: bool, room: Callable[[], int] = out_of_memory.free_memory
    ) -> None:
        self._room = room
        self._share = _REQUESTED_SHARE if requested else _DEFAULT_SHARE
        self._held: dict[str, int] = {}  # name -> descriptor
        self._server = PacketServer("phalanx-memory", snapshot_messages.question, is_worker, self._received)

    @property
    def name(self) -> str:
        """Return the address that workers connect to."""
        return self._server.name

    def close(self) -> None:
        """Close all connections and free the memory."""
        self._server.close()
        for name in list(self._held):
            self._drop(name)

    def _received(self, worker: socket.socket, question: snapshot_messages.Question) -> None:
        answer, fds = self._answer(question)
        try:
            socket.send_fds(worker, [encoding.encode(answer)], fds)
        except BlockingIOError:  # it does not read its answers
            return
        except OSError:
            self._server.disconnect(worker)

    def _answer(self, question: snapshot_messages.Question) -> tuple[snapshot_messages.Answer, list[int]]:
        match question:
            case snapshot_messages.Lend():
                why = self._lend(question.name, question.size)
                return snapshot_messages.Answer(refused=why), [] if why else [self._held[question.name]]
            case snapshot_messages.Show():
                held = self._held.get(question.name)
                return snapshot_messages.Answer(
                    refused="there is none" if held is None else ""
                ), [] if held is None else [held]
            case snapshot_messages.Drop():
                self._drop(question.name)
            case snapshot_messages.Count():
                return snapshot_messages.Answer(names=list(self._held)), []
        return snapshot_messages.Answer(), []

    def _lend(self, name: str, size: int) -> str:
        """Allocate or grow a memory. Returns the reason if that is not possible, or an empty string."""
        sizes = {held: os.fstat(fd) for held, fd in self._held.items()}
        here = sizes[name].st_size if name in sizes else 0
        if size > here:
            promised = sum(max(0, one.st_size - one.st_blocks * 512) for one in sizes.values())
            room = int(self._room() * self._share) - promised
            if size - here > room:
                return f"{_amount(size - here)} more are needed, and {_amount(max(0, room))} may be used"
        try:
            if name not in self._held:
                if len(self._held) >= _MOST:
                    return f"{_MOST} memories are lent already"
                self._held[name] = shared_memory.create("phalanx-snapshot", 0, shared_memory.GROWING)
            if size > here:
                os.truncate(self._held[name], size)
        except OSError as error:
            return str(error.strerror)
        return ""

    def _drop(self, name: str) -> None:
        fd = self._held.pop(name, None)
        if fd is not None:
            os.close(fd)


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
