"""The control port: accepts websockets on the sockets of the leader, with limits for unauthenticated callers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from phalanx.control import messages
from phalanx.control.leader.connection_gate import AT_ONCE, MOST, ConnectionGate, GateLimits, make_room

PATH = "/phalanx/worker"
SERVER = "phalanx"  # in the Server header: tells a member that it has reached a leader
CLOSE_TIMEOUT = 5.0  # seconds for members to disconnect at the end
_BACKLOG = 4096  # connections that the kernel queues


class ControlServer:
    """Serves the control port. `serve` is called with the request and the websocket of each caller.

    `members`: how many may come at the same time. `patience`: seconds for a caller to prove itself.
    """

    def __init__(
        self,
        serve: Callable[[web.BaseRequest, web.WebSocketResponse], Awaitable[None]],
        *,
        members: int,
        patience: float,
    ) -> None:
        self._serve = serve
        self._members = members
        # All members are unauthenticated at first.
        self._limits = GateLimits(most=MOST + members, patience=patience)
        self._gate: ConnectionGate | None = None
        self._servers: list[asyncio.Server] = []

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on the sockets."""
        make_room(self._members)
        gate = self._gate = ConnectionGate(self._handle, self._limits)
        for sock in sockets:
            # asyncio accepts as many connections at a time as the backlog says, before the gate can close one.
            server = await asyncio.get_running_loop().create_server(gate, sock=sock, backlog=AT_ONCE)
            self._servers.append(server)
            sock.listen(_BACKLOG)

    def trust(self, request: web.BaseRequest) -> None:
        """Lift the limits of an authenticated connection."""
        if self._gate is not None:
            self._gate.trust(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != PATH or request.method != "GET":
            return web.Response(status=404, text="phalanx control port\n", headers={"Server": SERVER})
        ws = web.WebSocketResponse(max_msg_size=messages.FRAME_LIMIT, compress=False, timeout=CLOSE_TIMEOUT)
        ws.headers["Server"] = SERVER
        if not ws.can_prepare(request):
            return web.Response(status=400, text="phalanx control port\n", headers={"Server": SERVER})
        await ws.prepare(request)
        await self._serve(request, ws)
        with contextlib.suppress(ConnectionError):
            await ws.close()
        return ws

    def stop_listening(self) -> None:
        """Accept no more connections."""
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._gate is not None:
            self._gate.close()
            await self._gate.shutdown(0.5)
