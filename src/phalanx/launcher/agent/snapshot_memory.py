"""Memory that outlives the workers of a node: they write snapshots of their state to it, and read them after a restart.

Each memory is a memfd: it has no name, and is freed when this process and all workers that use it have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable

import msgspec

from phalanx.contract import snapshot_messages
from phalanx.launcher.agent import out_of_memory

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_REQUESTED_SHARE = 0.9  # of the free memory, if the user asked for snapshots
_DEFAULT_SHARE = 0.25  # otherwise
_MOST = 4096  # memories at most


class SnapshotMemory:
    """Lends memory to workers over an abstract Unix socket, as much as there is room for.

    `requested`: the user asked for snapshots, so they may use most of the free memory.
    """

    def __init__(
        self, is_worker: Callable[[int], bool], *, requested: bool, room: Callable[[], int] = out_of_memory.room
    ) -> None:
        self._is_worker = is_worker  # whether a pid is a worker of this node
        self._room = room
        self._share = _REQUESTED_SHARE if requested else _DEFAULT_SHARE
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, int] = {}  # name -> descriptor
        self._clients: set[socket.socket] = set()
        self.name = f"phalanx-memory-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(64)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Close all connections and free the memory."""
        for client in list(self._clients):
            self._disconnect(client)
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for name in list(self._held):
            self._drop(name)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            pid, uid, _ = _CREDENTIALS.unpack(
                client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid() or not self._is_worker(pid):
                client.close()
                return
            client.setblocking(False)
            self._clients.add(client)
            self._loop.add_reader(client.fileno(), self._receive, client)

    def _receive(self, client: socket.socket) -> None:
        try:
            packet = client.recv(snapshot_messages.LARGEST)
            if not packet:
                self._disconnect(client)
                return
            answer, fds = self._answer(snapshot_messages.question(packet))
            socket.send_fds(client, [snapshot_messages.encode(answer)], fds)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # gone, or not a worker of phalanx
            self._disconnect(client)

    def _disconnect(self, client: socket.socket) -> None:
        self._clients.discard(client)
        self._loop.remove_reader(client.fileno())
        client.close()

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
        """Allocate or grow a memory. Returns why not, or an empty string."""
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
                self._held[name] = os.memfd_create("phalanx-snapshot", os.MFD_CLOEXEC)
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
