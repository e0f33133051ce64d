"""Accepts connections to the store, and connects admitted ones with torch's server."""

from __future__ import annotations

import select
import socket

from . import relay
from .access import AccessDecision, AgentLink, StoreAccess, log
from .private_port import PrivatePort
from .relay import RelayEnd

_ACCEPTED = 64  # connections accepted before the others are served
_PAUSE = 1.0  # seconds without accepting, when there are no descriptors


class StoreGate:
    """Connects the port that ranks know with the private port of torch's server."""

    def __init__(self, listener: socket.socket, port: PrivatePort, access: StoreAccess, link: AgentLink) -> None:
        self._listeners = {one.fileno(): one for one in (listener, port.own_client)}
        self._port = port
        self._access = access
        self._link = link
        self._ends: dict[int, RelayEnd] = {}
        self._poll = select.epoll()
        for fd, one in self._listeners.items():
            one.setblocking(False)
            self._poll.register(fd, select.EPOLLIN)

    def serve(self) -> None:
        """Serve until the agent ends."""
        ends, poll, agent = self._ends, self._poll, self._link.fileno()
        if agent >= 0:
            poll.register(agent, select.EPOLLIN)
        accepts = True
        while True:
            found = poll.poll(None if accepts else _PAUSE)
            if not accepts:
                accepts = self._accept_again()
            for fd, events in found:
                if fd in ends:
                    end = ends[fd]
                    if not end.ready(events):
                        self._close(end)
                elif fd in self._listeners:
                    accepts = self._accept(self._listeners[fd]) and accepts
                elif fd == agent and not self._receive():
                    return

    def close(self) -> None:
        """Close all connections, and the port that ranks know."""
        for end in self._ends.values():
            end.close()
        for listener in self._listeners.values():
            listener.close()
        self._access.close()
        self._poll.close()

    def _accept(self, listener: socket.socket) -> bool:
        """Accept the waiting connections. Return False if there are no more descriptors or no memory for one."""
        for _ in range(_ACCEPTED):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return True
            except OSError as error:
                log(f"cannot accept a connection: {error}")
                self._poll.modify(listener.fileno(), 0)
                return False
            match self._access.judge(sock):
                case AccessDecision.ADMITTED:
                    self._admit(sock)
                case AccessDecision.REFUSED:
                    sock.close()
        return True

    def _accept_again(self) -> bool:
        for fd in self._listeners:
            self._poll.modify(fd, select.EPOLLIN)
        return True

    def _receive(self) -> bool:
        """Handle an answer of the agent about a connection. Return False if the agent has ended."""
        message = self._link.receive()
        if message is None:
            return False
        sock = self._access.answered(message)
        if sock is not None:
            self._admit(sock)
        return True

    def _admit(self, sock: socket.socket) -> None:
        try:
            inner = self._port.connect()
        except OSError as error:
            log(f"cannot connect with the store: {error}")
            sock.close()
            return
        for end in relay.join(sock, inner, self._poll):
            self._ends[end.fd] = end

    def _close(self, end: RelayEnd) -> None:
        for one in (end, end.other):
            del self._ends[one.fd]
            one.close()
