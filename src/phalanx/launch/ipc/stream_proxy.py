"""A stream between a socket here and one on another node, carried by letters: bytes, their end, the end of both.

Whoever reads says how much it has read, so that no more is on its way than fits: a terminal that is held, or a rank
that does not read, holds back the one who writes, and fills nobody's memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

WINDOW = 1 << 20  # bytes on their way, at most
_CHUNK = 1 << 16  # bytes in a letter
_MOST = 4096  # letters that wait for a socket
_PAUSE = 0.02  # seconds between two: whatever a debugger prints, the run's own messages get through

Send = Callable[[bytes], None]


class StreamProxy(asyncio.Protocol):
    """`start` it once there is a socket; what arrives before waits.

    d data   a as many bytes of them have been read   e end of one direction   c closed
    """

    def __init__(self, rank: int, send: Send, ended: Callable[[], None]) -> None:
        self.rank = rank
        self._send = send
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._eofs = 0  # of the two directions
        self._closed = False  # by the other side
        self._underway = 0  # bytes that the other side has not read yet
        self._unread = 0  # bytes that came, and are not read here
        self._full = False  # nobody reads at the moment
        self._resting = False
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Task[object] | None = None

    def start(self, sock: socket.socket) -> None:
        self._starting = self._loop.create_task(self._loop.create_unix_connection(lambda: self, sock=sock))

    def arrived(self, kind: bytes, data: bytes) -> None:
        """Raises ValueError where the other side does not keep to what was said."""
        transport = self._transport
        if kind == b"d":
            self._unread += len(data)
            if self._unread > 2 * WINDOW:
                self.close()
                raise ValueError("more than was to be on its way")
        if transport is None:
            if len(self._early) < _MOST:
                self._early.append(kind + data)
        elif transport.is_closing():
            pass
        elif kind == b"d":
            transport.write(data)
            self._acknowledge()
        elif kind == b"a":
            self._underway -= int(data)
            self._go_on()
        elif kind == b"e":
            transport.write_eof()
            self._one_way_less()
        elif kind == b"c":
            self._closed = True
            transport.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        elif self._starting is not None:
            self._starting.cancel()

    # -- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        self._unread = 0
        for letter in self._early:
            self.arrived(letter[:1], letter[1:])
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _CHUNK):
            self._send(b"d" + data[at : at + _CHUNK])
        self._underway += len(data)
        if self._transport is not None:
            self._resting = True
            self._transport.pause_reading()
            self._loop.call_later(_PAUSE, self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._go_on()

    def _go_on(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._resting:
            return
        if self._underway < WINDOW:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._unread and not self._full:
            self._send(b"a%d" % self._unread)
            self._unread = 0

    def eof_received(self) -> bool:
        self._send(b"e")
        self._one_way_less()
        return True

    def _one_way_less(self) -> None:
        self._eofs += 1
        if self._eofs > 1 and self._transport is not None:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self._closed:
            self._send(b"c")
        self._ended()
