"""A stream between a socket here and one on another node, carried by letters: bytes, their end, the end of both."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_CHUNK = 1 << 16  # bytes in a letter
_PAUSE = 0.02  # seconds between two: whatever a debugger prints, the run's own messages get through

Send = Callable[[bytes], None]


class Bridge(asyncio.Protocol):
    """`start` it once there is a socket; what arrives before waits."""

    def __init__(self, rank: int, send: Send, ended: Callable[[], None]) -> None:
        self.rank = rank
        self._send = send
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._eofs = 0  # of the two directions
        self._closed = False  # by the other side
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Task[object] | None = None

    def start(self, sock: socket.socket) -> None:
        self._starting = self._loop.create_task(self._loop.create_unix_connection(lambda: self, sock=sock))

    def arrived(self, kind: bytes, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            self._early.append(kind + data)
        elif kind == b"d":
            transport.write(data)
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
        for letter in self._early:
            self.arrived(letter[:1], letter[1:])
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _CHUNK):
            self._send(b"d" + data[at : at + _CHUNK])
        if self._transport is not None:
            self._transport.pause_reading()
            self._loop.call_later(_PAUSE, self._go_on)

    def _go_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

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
