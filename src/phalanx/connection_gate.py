"""Limits for connections that are not authenticated yet: how many, for how long, how many bytes.

The control port of a leader and the page have them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

# Do not log garbage on the port.
_SILENT = logging.Logger("phalanx.connection_gate")
_SILENT.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class GateLimits:
    """Limits for unauthenticated connections."""

    most: int  # connections
    patience: float  # seconds for the authentication
    allowance: int  # bytes for the authentication
    field: int = 4096  # bytes of a header


class Connection(web.RequestHandler):
    """A connection that may send only a limited number of bytes before it is trusted."""

    __slots__ = ("allowance",)

    allowance: int | None  # bytes; None: it is trusted

    def data_received(self, data: bytes) -> None:
        """Count bytes, and close the connection when there are too many."""
        if self.allowance is not None:
            self.allowance -= len(data)
            if self.allowance < 0:
                turn_away(self)
                return
        super().data_received(data)


class UntrustedConnections:
    """The connections that are not authenticated: how many there may be, and for how long."""

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self._since: dict[object, tuple[float, str, Callable[[], object]]] = {}  # oldest first
        self._by_address: dict[str, dict[object, None]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def add(self, key: object, address: str, close: Callable[[], object]) -> None:
        """Register a connection. If there are too many, close one: the oldest of the address that has most."""
        self._since[key] = (time.monotonic(), address, close)
        self._by_address.setdefault(address, {})[key] = None
        if len(self._since) > self._limits.most:
            busiest = max(self._by_address.values(), key=len)
            self._turn_away(next(iter(busiest)))
        if self._sweeper is None:
            self._sweeper = self._later()

    def forget(self, key: object) -> None:
        """Remove a connection: it is authenticated, or closed."""
        known = self._since.pop(key, None)
        if known is not None:
            same = self._by_address[known[1]]
            del same[key]
            if not same:
                del self._by_address[known[1]]

    def close(self) -> None:
        """Close all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for key in list(self._since):
            self._turn_away(key)

    def _later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(min(1.0, self._limits.patience / 4), self._sweep)

    def _sweep(self) -> None:
        now = time.monotonic()
        for key, (since, _, _) in list(self._since.items()):
            if now - since <= self._limits.patience:
                break  # the others are newer
            self._turn_away(key)
        self._sweeper = self._later() if self._since else None

    def _turn_away(self, key: object) -> None:
        close = self._since[key][2]
        self.forget(key)
        close()


class ConnectionGate(web.Server):
    """The server of aiohttp, with limits for unauthenticated connections."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limits: GateLimits) -> None:
        super().__init__(
            handler,
            access_log=None,
            logger=_SILENT,
            keepalive_timeout=5.0,
            max_line_size=4096,
            max_field_size=limits.field,
            auto_decompress=False,  # few bytes could expand to many
        )
        self._limits = limits
        self.untrusted = UntrustedConnections(limits)

    def __call__(self) -> web.RequestHandler:
        """Return the handler of a new connection."""
        connection = Connection(self, loop=self._loop, **self._kwargs)
        connection.allowance = self._limits.allowance
        return connection

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Register a connection. If there are too many, close one."""
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")
        self.untrusted.add(handler, str(peer[0]) if peer else "", lambda: turn_away(handler))

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Remove a connection."""
        self.untrusted.forget(handler)
        super().connection_lost(handler, exc)

    def trust(self, request: web.BaseRequest) -> None:
        """Remove the limits of an authenticated connection."""
        connection = request.protocol
        self.untrusted.forget(connection)
        if isinstance(connection, Connection):
            connection.allowance = None

    def close(self) -> None:
        """Close all unauthenticated connections."""
        self.untrusted.close()


def turn_away(handler: web.RequestHandler) -> None:
    """Close a connection at once."""
    if handler.transport is not None:
        handler.transport.abort()
