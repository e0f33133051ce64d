"""The connection to one viewer. A slow viewer gets fewer samples, and is dropped if it falls far behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from phalanx.contract import events

_SAMPLES_LIMIT = 1 << 20  # bytes: a viewer that is further behind gets no samples
_DROP_LIMIT = 1 << 24  # bytes: a viewer that is further behind is dropped; a sample of 32,768 ranks has 5 MB
_STUCK = 60.0  # seconds without reading anything, while it is sent the past
_SAMPLE_PREFIX = b'{"event":"%b"' % str(events.ClusterSample.__struct_config__.tag).encode()


class Viewer(asyncio.Protocol):
    """One connection to a viewer. Writing to it never blocks. `left` is called when it has disconnected."""

    def __init__(self, left: Callable[[Viewer], None]) -> None:
        self._left = left
        self._transport: asyncio.Transport | None = None
        self._held: deque[bytes] | None = deque()  # events that happen while it receives the past
        self._behind = 0  # bytes of these
        self._gone = False
        self._last = False  # nothing more follows
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        transport.set_write_buffer_limits(_SAMPLES_LIMIT // 2)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        """Report that the viewer has left."""
        self._transport, self._gone = None, True
        self._room.set()
        self._left(self)

    def pause_writing(self) -> None:
        """Stop sending the past."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Continue to send the past."""
        self._room.set()

    def send(self, line: bytes) -> None:
        """Send a line, unless the viewer is too far behind."""
        if self._gone or self._last:
            return
        written = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if written + self._behind > _SAMPLES_LIMIT and line.startswith(_SAMPLE_PREFIX):
            return
        if written + self._behind > _DROP_LIMIT:
            self.drop()
        elif self._held is not None:
            self._held.append(line)
            self._behind += len(line)
        elif self._transport is not None:
            self._transport.write(line)

    async def send_past(self, lines: AsyncIterator[bytes]) -> None:
        """Send the past, then the events that have happened meanwhile."""
        try:
            async for part in lines:
                if self._transport is None:
                    return
                self._transport.write(part)
                async with asyncio.timeout(_STUCK):
                    await self._room.wait()
        except TimeoutError:
            self.drop()
        held, self._held, self._behind = self._held or (), None, 0
        if self._transport is not None:
            self._transport.write(b"".join(held))
        if self._last:
            self.close()

    def drop(self) -> None:
        """Disconnect at once."""
        if self._transport is not None:
            self._transport.abort()
        self._gone = True

    def close(self) -> None:
        """Disconnect once everything is sent."""
        self._last = True
        if self._transport is not None and self._held is None:
            self._transport.close()
