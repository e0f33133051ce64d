"""Unix sockets for the workers of this node, with one message per packet. Only workers of this node may connect."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from phalanx.contract.encoding import PACKET_LIMIT, Decoder
from phalanx.forkserver import linux

T = TypeVar("T")


class PacketServer(Generic[T]):
    """Accepts workers on an abstract Unix socket, which disappears with this process.

    admits    called with the pid of a caller, which has the user id of this process
    received  called with a connection and a message; a malformed message ends the connection
    closed    called with the pid of a worker soon after its connection has ended
    """

    def __init__(
        self,
        prefix: str,
        decoder: Decoder[T],
        admits: Callable[[int], bool],
        received: Callable[[socket.socket, T], None],
        closed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._decoder = decoder
        self._admits = admits
        self._received = received
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self.connections: dict[socket.socket, int] = {}  # -> pid of the worker
        self.name = f"{prefix}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(64)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            peer = linux.peer(connection)
            if not peer.is_same_user or not self._admits(peer.pid):
                connection.close()
                return
            connection.setblocking(False)
            self.connections[connection] = peer.pid
            self._loop.add_reader(connection.fileno(), self.receive, connection)

    def receive(self, connection: socket.socket) -> bool:
        """Handle one packet. Return whether there was one."""
        try:
            packet = connection.recv(PACKET_LIMIT)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        try:
            message = self._decoder.decode(packet)
        except msgspec.DecodeError:  # the worker has ended, or is not a worker of phalanx
            if (pid := self.connections.get(connection)) is not None:
                self._loop.call_soon(self._closed, pid)
            self.disconnect(connection)
            return False
        self._received(connection, message)
        return True

    def disconnect(self, connection: socket.socket) -> None:
        """Close a connection, if it is open."""
        if self.connections.pop(connection, None) is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()

    def close(self) -> None:
        """Stop listening and close all connections."""
        for connection in list(self.connections):
            self.disconnect(connection)
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
