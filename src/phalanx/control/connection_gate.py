"""Strangers at the port: how many there may be, for how long, and what they may say. Members are not its business."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from phalanx.control.messages import JOIN_REQUEST_LIMIT
from phalanx.errors import JoinError

MOST = 512  # connections that have not proved anything yet, besides those of the members that are expected
PATIENCE = 10.0  # seconds to do it in
ALLOWANCE = JOIN_REQUEST_LIMIT + (1 << 14)  # bytes to do it with: a request and a knock
AT_ONCE = 64  # connections that are taken before those taken earlier are looked at
_OTHER_FILES = 256  # that this process may need besides

# Garbage on the port is nothing to tell the user about, line by line.
_SILENT = logging.Logger("phalanx.control.connection_gate")
_SILENT.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class GateLimits:
    """To what strangers can hold."""

    most: int = MOST  # connections
    patience: float = PATIENCE
    allowance: int = ALLOWANCE
    field: int = 4096  # bytes of a header


class Connection(web.RequestHandler):
    """A connection, which would take in whatever is sent, with a limit to what a stranger can send."""

    __slots__ = ("allowance",)

    allowance: int | None  # bytes; None: it is trusted

    def data_received(self, data: bytes) -> None:
        if self.allowance is not None:
            self.allowance -= len(data)
            if self.allowance < 0:
                turn_away(self)
                return
        super().data_received(data)


class ConnectionGate(web.Server):
    """aiohttp's server, which would keep any connection for ever, with a limit to what strangers can hold."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limits: GateLimits) -> None:
        super().__init__(
            handler,
            access_log=None,
            logger=_SILENT,
            keepalive_timeout=5.0,
            max_line_size=4096,
            max_field_size=limits.field,
            auto_decompress=False,  # few bytes could become many
        )
        self._limits = limits
        self._strangers: dict[web.RequestHandler, tuple[float, str]] = {}  # in order of arrival
        self._by_address: dict[str, dict[web.RequestHandler, None]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def __call__(self) -> web.RequestHandler:
        visitor = Connection(self, loop=self._loop, **self._kwargs)
        visitor.allowance = self._limits.allowance
        return visitor

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        self._strangers[handler] = (time.monotonic(), address)
        self._by_address.setdefault(address, {})[handler] = None
        if len(self._strangers) > self._limits.most:
            self._drop_one()
        if self._sweeper is None:
            self._sweeper = self._later()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._forget(handler)
        super().connection_lost(handler, exc)

    def trust(self, request: web.BaseRequest) -> None:
        """It has proved itself: no longer a stranger."""
        visitor = request.protocol
        self._forget(visitor)
        if isinstance(visitor, Connection):
            visitor.allowance = None

    def _forget(self, handler: web.RequestHandler) -> None:
        _, address = self._strangers.pop(handler, (0.0, None))
        if address is not None:
            same = self._by_address[address]
            del same[handler]
            if not same:
                del self._by_address[address]

    def _drop_one(self) -> None:
        """The oldest of the address that has most: whoever floods the door closes it for himself."""
        busiest = max(self._by_address.values(), key=len)
        self._turn_away(next(iter(busiest)))

    def _later(self) -> asyncio.TimerHandle:
        return self._loop.call_later(min(1.0, self._limits.patience / 4), self._sweep)

    def _sweep(self) -> None:
        now = time.monotonic()
        for handler, (since, _) in list(self._strangers.items()):
            if now - since <= self._limits.patience:
                break  # those after it came later
            self._turn_away(handler)
        self._sweeper = self._later() if self._strangers else None

    def _turn_away(self, handler: web.RequestHandler) -> None:
        self._forget(handler)
        turn_away(handler)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for handler in list(self._strangers):
            self._turn_away(handler)


def turn_away(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()


def make_room(members: int) -> None:
    """Let this process have as many files as members and strangers may need; the usual limit is 1,024."""
    needed = members + MOST + 3 * AT_ONCE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < members + _OTHER_FILES:
        raise JoinError(
            f"{members} nodes cannot join: this process may have {hard} files open, and every node is one",
            details=[f"{members + _OTHER_FILES} are needed at least"],
            fix=f"raise the hard limit of open files on node 0: ulimit -Hn {needed}, LimitNOFILE= or limits.conf",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
