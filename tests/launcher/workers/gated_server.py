"""A gate of the store in this process, with a server of the test behind it instead of torch's."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from phalanx.forkserver.store.access import AgentLink, StoreAccess
from phalanx.forkserver.store.gate import StoreGate
from phalanx.forkserver.store.private_port import PrivatePort
from tests.launcher.workers.store_host import TIMEOUT


class GatedServer:
    """A listening socket behind a gate, and the agent's end of the gate's socket."""

    def __init__(self, listener: socket.socket, agent: socket.socket, gate: StoreGate, port: PrivatePort) -> None:
        self.address: tuple[str, int] = listener.getsockname()
        self.port = port
        self.agent = agent
        self._thread = threading.Thread(target=gate.serve)

    def start(self) -> None:
        """Accept connections. Earlier ones have waited."""
        self._thread.start()

    def end(self) -> None:
        """End the gate, like the end of the agent."""
        self.agent.close()
        self._thread.join()

    def call(self) -> socket.socket:
        """Return a connection to the gate."""
        return socket.create_connection(self.address, timeout=TIMEOUT)

    def connection(self) -> tuple[socket.socket, socket.socket]:
        """Return a connection through the gate: the client's end, and the server's."""
        client = self.call()
        return client, self.accept()

    def accept(self) -> socket.socket:
        """Return the next connection that the gate admits."""
        server, _ = self.port.listener.accept()
        server.settimeout(TIMEOUT)
        return server

    def message(self) -> dict[str, Any]:
        """Return the next message for the agent."""
        message: dict[str, Any] = json.loads(self.agent.recv(4096))
        return message

    def answer(self, **message: object) -> None:
        """Answer as the agent."""
        self.agent.send(json.dumps(message).encode())


@contextlib.contextmanager
def gated_server(*, remote: bool = False) -> Iterator[GatedServer]:
    """Open a gate, which accepts no connection before it is started."""
    agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.settimeout(TIMEOUT)
    link = AgentLink(theirs.detach())
    port = PrivatePort()
    port.listener.settimeout(TIMEOUT)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    gate = StoreGate(listener, port, StoreAccess(link, remote=remote), link)
    server = GatedServer(listener, agent, gate, port)
    try:
        yield server
    finally:
        server.end()
        gate.close()
        link.close()
        port.close()
