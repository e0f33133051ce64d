"""The control port: websockets over TLS, on the sockets of the leader, with limits for unauthenticated callers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from phalanx.connection_gate import ConnectionGate, GateLimits
from phalanx.control import messages
from phalanx.control.leader.listener import Listener
from phalanx.errors import JoinError

PATH = "/phalanx/worker"
SERVER = "phalanx"  # in the Server header: tells a member that it has reached a leader
FINGERPRINT = "Phalanx-Token"  # a header: the fingerprint of the sender's token, to explain a failed TLS handshake
CLOSE_TIMEOUT = 5.0  # seconds for members to disconnect at the end
MOST = 512  # unauthenticated connections, besides those of expected members
AT_ONCE = 64  # connections that are accepted at a time
_ALLOWANCE = messages.JOIN_REQUEST_LIMIT + (1 << 14)  # bytes for the authentication
_OTHER_FILES = 256  # further files that this process may need
_BACKLOG = 4096  # connections that the kernel queues


class ControlServer:
    """Serves the control port. `serve` is called with the request and the websocket of each caller.

    `fingerprint` of the token. `other_token`: called with the address of a caller that reports another token.
    `members`: maximum number of concurrent members. `patience`: seconds for a caller to authenticate.
    """

    def __init__(
        self,
        serve: Callable[[web.BaseRequest, web.WebSocketResponse], Awaitable[None]],
        *,
        fingerprint: str,
        other_token: Callable[[str], None],
        members: int,
        patience: float,
    ) -> None:
        self._serve = serve
        self._headers = {"Server": SERVER, FINGERPRINT: fingerprint}
        self._other_token = other_token
        self._members = members
        # All members are unauthenticated at first.
        self._limits = GateLimits(most=MOST + members, patience=patience, allowance=_ALLOWANCE)
        self._gate: ConnectionGate | None = None
        self._listener: Listener | None = None

    def open(self, sockets: Sequence[socket.socket], context: ssl.SSLContext) -> None:
        """Listen on the sockets."""
        make_room(self._members)
        self._gate = ConnectionGate(self._handle, self._limits)
        self._listener = Listener(self._gate, context, patience=self._limits.patience)
        for sock in sockets:
            self._listener.listen(sock, _BACKLOG)

    def trust(self, request: web.BaseRequest) -> None:
        """Remove the limits of an authenticated connection."""
        if self._gate is not None:
            self._gate.trust(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if "Origin" in request.headers:  # from a browser, where any page can open a websocket; an agent never sends it
            text = "phalanx control port: browsers are refused\n"
            return web.Response(status=403, text=text, headers=self._headers)
        transport = request.transport
        if transport is None or transport.get_extra_info("ssl_object") is None:
            theirs = request.headers.get(FINGERPRINT)
            if transport is not None and theirs is not None and theirs != self._headers[FINGERPRINT]:
                self._other_token(host(transport, "peername"))
            return web.Response(status=404, text="phalanx control port: TLS only\n", headers=self._headers)
        if request.path != PATH or request.method != "GET":
            return web.Response(status=404, text="phalanx control port\n", headers=self._headers)
        ws = web.WebSocketResponse(max_msg_size=messages.FRAME_LIMIT, compress=False, timeout=CLOSE_TIMEOUT)
        ws.headers["Server"] = SERVER
        if not ws.can_prepare(request):
            return web.Response(status=400, text="phalanx control port\n", headers=self._headers)
        await ws.prepare(request)
        await self._serve(request, ws)
        with contextlib.suppress(ConnectionError):
            await ws.close()
        return ws

    def stop_listening(self) -> None:
        """Accept no more connections."""
        if self._listener is not None:
            self._listener.stop()

    async def close(self) -> None:
        """Close all connections."""
        if self._listener is not None:
            await self._listener.close()
        if self._gate is not None:
            self._gate.close()
            await self._gate.shutdown(0.5)


def host(transport: asyncio.BaseTransport, end: str) -> str:
    """Return the address of one end of a connection: "peername" or "sockname". Raises ConnectionResetError."""
    name = transport.get_extra_info(end)
    if not name:
        raise ConnectionResetError
    return str(name[0]).removeprefix("::ffff:")  # an IPv4 address on a dual-stack socket


def make_room(members: int) -> None:
    """Raise the limit of open files if members and other callers need more."""
    needed = members + MOST + 3 * AT_ONCE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < members + _OTHER_FILES:
        raise JoinError(
            f"{members} nodes cannot join: the limit of open files is {hard}, and every node needs one",
            details=[f"at least {members + _OTHER_FILES} are needed"],
            fix=f"raise the hard limit of open files on node 0: ulimit -Hn {needed}, LimitNOFILE= or limits.conf",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
