"""A byte stream between a socket here and one on another node, carried by RPC messages.

The reader acknowledges the bytes it has read, and the sender stops at a window of unacknowledged bytes: a terminal or a
rank that does not read slows the sender down and does not fill memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

WINDOW = 1 << 20  # bytes in flight, at most
_CHUNK = 1 << 16  # bytes in a message
_MAX_EARLY = 4096  # messages that wait for the socket
_PAUSE = 0.02  # seconds between two reads: the run's own messages must get through a debugger's output

Send = Callable[[bytes], None]


class StreamProxy(asyncio.Protocol):
    """One end of a stream. Call `start` once there is a socket; messages that arrive earlier wait.

    Messages: d data, a number of bytes read, e end of one direction, c closed.
    """

    def __init__(self, rank: int, send: Send, on_end: Callable[[], None]) -> None:
        self.rank = rank
        self._send = send
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._eofs = 0  # directions that have ended
        self._closed = False  # by the other side
        self._in_flight = 0  # bytes that the other side has not read yet
        self._unread = 0  # bytes received and not acknowledged
        self._full = False  # the local socket accepts no more at the moment
        self._pausing = False
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Task[object] | None = None

    def start(self, sock: socket.socket) -> None:
        """Connect the stream to a local socket."""
        self._starting = self._loop.create_task(self._loop.create_unix_connection(lambda: self, sock=sock))

    def receive(self, kind: bytes, data: bytes) -> None:
        """Process a message of the other side. Raises ValueError if it violates the protocol."""
        transport = self._transport
        if kind == b"d":
            self._unread += len(data)
            if self._unread > 2 * WINDOW:
                self.close()
                raise ValueError("more bytes in flight than the window allows")
        if transport is None:
            if len(self._early) < _MAX_EARLY:
                self._early.append(kind + data)
        elif transport.is_closing():
            pass
        elif kind == b"d":
            transport.write(data)
            self._acknowledge()
        elif kind == b"a":
            self._in_flight -= int(data)
            self._resume()
        elif kind == b"e":
            transport.write_eof()
            self._direction_ended()
        elif kind == b"c":
            self._closed = True
            transport.close()

    def close(self) -> None:
        """Close the local socket, or do not connect it."""
        if self._transport is not None:
            self._transport.close()
        elif self._starting is not None:
            self._starting.cancel()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Process data that arrived before the connection."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        self._unread = 0
        for message in self._early:
            self.receive(message[:1], message[1:])
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        """Send data to the other side, then pause."""
        for at in range(0, len(data), _CHUNK):
            self._send(b"d" + data[at : at + _CHUNK])
        self._in_flight += len(data)
        if self._transport is not None:
            self._pausing = True
            self._transport.pause_reading()
            self._loop.call_later(_PAUSE, self._end_pause)

    def _end_pause(self) -> None:
        self._pausing = False
        self._resume()

    def _resume(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._pausing:
            return
        if self._in_flight < WINDOW:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Stop acknowledging: the local socket is full."""
        self._full = True

    def resume_writing(self) -> None:
        """Acknowledge again."""
        self._full = False
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._unread and not self._full:
            self._send(b"a%d" % self._unread)
            self._unread = 0

    def eof_received(self) -> bool:
        """Tell the other side that this direction has ended."""
        self._send(b"e")
        self._direction_ended()
        return True

    def _direction_ended(self) -> None:
        self._eofs += 1
        if self._eofs > 1 and self._transport is not None:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        """Tell the other side, if it does not know, and report the end."""
        if not self._closed:
            self._send(b"c")
        self._on_end()
