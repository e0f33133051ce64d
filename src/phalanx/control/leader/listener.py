"""Accepts connections on the control port: TLS, or plain HTTP, which only gets the answer that phalanx listens here."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from phalanx.connection_gate import ConnectionGate
from phalanx.control.leader import tls_transport
from phalanx.control.tls import HANDSHAKE

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 2.0  # seconds for the other side to end TLS
_ACCEPT_RETRY = 1.0  # seconds after an error, for example when no file descriptor is left


class Listener:
    """Accepts connections on `sockets`, and passes them to the gate once TLS has authenticated the caller.

    The limits of the gate also apply during the TLS handshake.
    """

    def __init__(self, gate: ConnectionGate, context: ssl.SSLContext, *, patience: float) -> None:
        self._gate = gate
        self._context = context
        self._patience = patience
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Task[None]] = set()

    def listen(self, sock: socket.socket, backlog: int) -> None:
        """Listen on a socket."""
        sock.setblocking(False)
        sock.listen(backlog)
        self._sockets.append(sock)
        self._accepting.append(asyncio.get_running_loop().create_task(self._accept(sock)))

    def stop(self) -> None:
        """Accept no more connections."""
        for task in self._accepting:
            task.cancel()
        for sock in self._sockets:
            if sock.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(sock)  # the cancelled task does so too late
            sock.close()
        self._sockets.clear()

    async def close(self) -> None:
        """Drop connections that are not authenticated yet."""
        self.stop()
        for task in (opening := list(self._opening)):
            task.cancel()
        await asyncio.gather(*opening, *self._accepting, return_exceptions=True)

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(sock)
            except OSError:
                if sock.fileno() < 0:
                    return
                await asyncio.sleep(_ACCEPT_RETRY)
                continue
            task = loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
            self._gate.untrusted.add(task, str(peer[0]), task.cancel)
            task.add_done_callback(self._gate.untrusted.forget)
            # With callers pending, sock_accept never suspends, and no other task of this loop would run.
            await asyncio.sleep(0)

    async def _open(self, connection: socket.socket) -> None:
        """Authenticate a caller, and pass its connection to the gate."""
        try:
            first = await _first_byte(connection)
        except BaseException:
            connection.close()
            raise
        if first is None:
            connection.close()
            return
        try:  # from here on the transport closes the socket
            if first == HANDSHAKE:
                await tls_transport.accept(
                    connection, self._context, self._gate, timeout=self._patience, close_timeout=_CLOSE_TIMEOUT
                )
            else:
                await asyncio.get_running_loop().connect_accepted_socket(self._gate, connection)
        except OSError as error:  # SSLError and TimeoutError, too
            logger.debug("a connection was not authenticated: %s", error)


async def _first_byte(connection: socket.socket) -> int | None:
    """Return the first byte without consuming it. None: the caller has disconnected."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    try:
        data = connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return None
    return data[0] if data else None
