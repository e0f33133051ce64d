"""Relays data between the two ends of a connection through the gate. An end that does not read stops the other."""

from __future__ import annotations

import contextlib
import select
import socket

_SCRATCH = bytearray(256 << 10)  # maximum that one read of a socket returns, and that is buffered for a slow peer
_VIEW = memoryview(_SCRATCH)
_READ, _WRITE = int(select.EPOLLIN), int(select.EPOLLOUT)


class RelayEnd:
    """One of the two sockets of a relayed connection."""

    def __init__(self, sock: socket.socket, poll: select.epoll) -> None:
        self.fd = sock.fileno()
        self.other: RelayEnd = self
        self._sock = sock
        self._receive, self._send = sock.recv_into, sock.send  # looked up once: each message calls both
        self._poll = poll
        self._unsent = memoryview(b"")  # data that this end has not accepted yet
        self._ended = False  # this end sends nothing more
        self._events = _READ
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(self.fd, self._events)

    def ready(self, events: int) -> bool:
        """Read and write as far as possible. Return whether the connection remains."""
        try:
            if events & _WRITE:
                self._flush()
            if self._events & _READ and events != _WRITE:
                if count := self._receive(_SCRATCH):
                    self._pass_on(count)
                    return True
                self._end()
        except BlockingIOError:  # nothing to read
            return True
        except OSError:
            return False
        other = self.other
        return not (self._ended and other._ended) or bool(self._unsent or other._unsent)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _pass_on(self, count: int) -> None:
        """Send to the other end what was just read. Nothing more is read until it has accepted all."""
        other = self.other
        try:
            sent = other._send(_VIEW[:count])
        except BlockingIOError:
            sent = 0
        if sent < count:
            other._unsent = memoryview(bytes(_VIEW[sent:count]))
            other._await(other._events | _WRITE)
            self._await(self._events & ~_READ)

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._send(self._unsent) :]
        if self._unsent:
            return
        self._await(self._events & ~_WRITE)
        if self.other._ended:
            self._shut()
        else:
            self.other._await(self.other._events | _READ)

    def _end(self) -> None:
        self._ended = True
        self._await(self._events & ~_READ)
        if not self.other._unsent:
            self.other._shut()

    def _shut(self) -> None:
        """Signal this end that the other one sends nothing more."""
        with contextlib.suppress(OSError):  # it is closed, which its next event shows
            self._sock.shutdown(socket.SHUT_WR)

    def _await(self, events: int) -> None:
        """Wait for other events. A socket without awaited events is removed: epoll would report a hang-up forever."""
        before, self._events = self._events, events
        if before and not events:
            self._poll.unregister(self.fd)
        elif events and not before:
            self._poll.register(self.fd, events)
        elif events != before:
            self._poll.modify(self.fd, events)


def join(one: socket.socket, other: socket.socket, poll: select.epoll) -> tuple[RelayEnd, RelayEnd]:
    """Relay between two sockets. Return the ends; call `ready` of an end for each of its events."""
    ends = RelayEnd(one, poll), RelayEnd(other, poll)
    ends[0].other, ends[1].other = ends[1], ends[0]
    return ends
