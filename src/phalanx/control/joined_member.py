"""A member that has joined: its connection, its messages, and how its clock differs from ours."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from aiohttp import web

from phalanx.control import messages
from phalanx.control.channel import Channel
from phalanx.control.messages import NodeInfo


@dataclass
class JoinedMember:
    """One connection is one membership. It ends with a closed connection or after a timeout."""

    id: int
    arrival: NodeInfo
    address: str  # of the member, as seen from the leader
    reached: str  # address of the leader by which the member came
    channel: Channel
    transport: asyncio.BaseTransport
    outbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    heard: float = 0.0  # monotonic time of the latest message
    quiet: bool = False  # it has not answered for a while
    gone: bool = False  # it has said that it leaves
    closing: bool = False  # the leader has closed the connection
    skew: float = 0.0  # its clock minus ours
    trip: float = float("inf")  # the shortest round trip of a ping, which measures the skew best

    async def write(self, ws: web.WebSocketResponse) -> None:
        """Send queued messages until None is queued, then close the connection."""
        with contextlib.suppress(ConnectionError):
            while (content := await self.outbox.get()) is not None:
                await ws.send_bytes(self.channel.seal(content))
            self.closing = True
            await ws.close()

    def record_pong(self, pong: messages.Pong) -> None:
        """Measure the clock skew by an answered ping."""
        now = time.time()
        trip = now - pong.ping
        if 0 <= trip < self.trip:
            self.trip, self.skew = trip, pong.time - (pong.ping + now) / 2

    def abort(self) -> None:
        """Close the connection at once, without sending what is still queued."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
