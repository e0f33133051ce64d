"""The channels between the agent and its workers that can regroup. Workers connect; a plain script never does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from phalanx.contract import encoding
from phalanx.contract.messages import worker_messages
from phalanx.launcher.ipc.packet_server import PacketServer


class WorkerChannels:
    """One channel per worker.

    `is_worker` returns whether a process may connect; `received` gets each message with the pid of its worker;
    `closed` gets the pid of a worker whose channel has ended.
    """

    def __init__(
        self,
        is_worker: Callable[[int], bool],
        received: Callable[[int, worker_messages.FromWorker], None],
        closed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._is_worker = is_worker
        self._on_message = received
        self._server = PacketServer("phalanx", worker_messages.from_worker, self._admits, self._received, closed)

    @property
    def name(self) -> str:
        """Return the address that workers connect to."""
        return self._server.name

    @property
    def connections(self) -> frozenset[int]:
        """Return the pids of connected workers."""
        return frozenset(self._server.connections.values())

    def _admits(self, pid: int) -> bool:
        return self._is_worker(pid) and pid not in self.connections

    def _received(self, connection: socket.socket, message: worker_messages.FromWorker) -> None:
        self._on_message(self._server.connections[connection], message)

    def _connection(self, pid: int) -> socket.socket | None:
        return next((one for one, other in self._server.connections.items() if other == pid), None)

    def send(self, pid: int, message: worker_messages.FromAgent) -> None:
        """Send a message to a worker, if it is still connected."""
        connection = self._connection(pid)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.send(encoding.encode(message))

    def drain(self, pid: int) -> None:
        """Handle everything that a worker sent before it ended."""
        while (connection := self._connection(pid)) is not None and self._server.receive(connection):
            pass

    def close(self) -> None:
        """Close all connections."""
        self._server.close()
