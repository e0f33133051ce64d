"""The channels between the agent and its workers that can regroup. Workers connect; a plain script never does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable

import msgspec

from phalanx.contract import worker_messages

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class WorkerChannels:
    """Accepts the connections of workers on an abstract Unix socket, which vanishes with this process.

    `is_worker` returns whether a process may connect; `received` gets each message with the pid of its worker.
    """

    def __init__(
        self, is_worker: Callable[[int], bool], received: Callable[[int, worker_messages.FromWorker], None]
    ) -> None:
        self._is_worker = is_worker
        self._received = received
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, socket.socket] = {}
        self.name = f"phalanx-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(64)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def send(self, pid: int, message: worker_messages.FromAgent) -> None:
        """Send a message to a worker, if it is still connected."""
        connection = self._connections.get(pid)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.send(worker_messages.encode(message))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            pid, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid() or not self._is_worker(pid) or pid in self._connections:
                connection.close()
                return
            connection.setblocking(False)
            self._connections[pid] = connection
            self._loop.add_reader(connection.fileno(), self._receive, pid, connection)

    def drain(self, pid: int) -> None:
        """Handle all that a worker sent before it ended."""
        while (connection := self._connections.get(pid)) is not None and self._receive(pid, connection):
            pass

    def _receive(self, pid: int, connection: socket.socket) -> bool:
        """Handle one message. Returns whether there was one."""
        try:
            packet = connection.recv(worker_messages.LARGEST)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        message: worker_messages.FromWorker | None = None
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            message = worker_messages.from_worker(packet) if packet else None
        if message is None:  # gone, or not a worker of phalanx
            self._disconnect(pid)
        else:
            self._received(pid, message)
        return message is not None

    def _disconnect(self, pid: int) -> None:
        connection = self._connections.pop(pid, None)
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for pid in list(self._connections):
            self._disconnect(pid)
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
