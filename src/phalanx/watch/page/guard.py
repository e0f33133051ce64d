"""Who gets in, and how much a stranger may hold: nobody is told anything of the run before it is known that he may be.

Against pages of other sites in the same browser: the name they call us by (`Host`), where they come from (`Origin`,
`Sec-Fetch-Site`), and a cookie that is not sent along for them. Against whoever else reaches the port: the key.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from phalanx.watch.page.keys import Keys

MOST = 128  # connections of strangers; a browser has six
PATIENCE = 30.0  # seconds for one of them: the page itself may come by a slow line
_ALLOWANCE = 1 << 16  # bytes that it may send
_FIELD = 1 << 13  # bytes of a header: browsers send the cookies of everything that ever was on this host, on any port
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Server": "phalanx",
}
_SILENT = logging.Logger("phalanx.watch.page")  # what strangers send is nothing to tell the user about
_SILENT.addHandler(logging.NullHandler())

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def sealed(response: web.StreamResponse) -> web.StreamResponse:
    """With what every answer carries."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def refused(status: int, why: str) -> web.StreamResponse:
    return sealed(web.Response(status=status, text=why + "\n"))


def foreign(request: web.BaseRequest, names: frozenset[str], *, digits: bool) -> str:
    """Why this is none of our own pages; empty: it may be one. `digits`: any address in digits is our name as well."""
    host = request.headers.get("Host", "")
    if not _ours(host, names, digits=digits):
        return "this is not a name of this page"
    origin = request.headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return "a page of another origin asks"
    site = request.headers.get("Sec-Fetch-Site", "none")
    # A link to it may stand anywhere: what it leads to is the shell, which holds nothing.
    follows = request.method == "GET" and request.path == "/" and request.headers.get("Sec-Fetch-Mode") == "navigate"
    if site not in ("same-origin", "none") and not follows:
        return "a page of another site asks"
    return ""


def _ours(host: str, names: frozenset[str], *, digits: bool) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        name, _ = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return False
    if parts.netloc != host or "@" in host:
        return False
    if name in names:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return digits or address.is_loopback


def entitled(request: web.BaseRequest, keys: Keys, *, bearer: bool = False) -> bool:
    if keys.knows(request.cookies.get(keys.cookie_name)):
        return True
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return bearer and scheme.lower() == "bearer" and keys.opens(key.strip())


class _Visitor(web.RequestHandler):
    """A connection, with a limit to what a stranger can send."""

    __slots__ = ("allowance",)

    allowance: int | None  # bytes; None: it is trusted

    def data_received(self, data: bytes) -> None:
        if self.allowance is not None:
            self.allowance -= len(data)
            if self.allowance < 0:
                _turn_away(self)
                return
        super().data_received(data)


class Guard(web.Server):
    """aiohttp's server, which would keep any connection for ever, with a limit to what strangers can hold."""

    def __init__(self, handler: Handler, *, most: int = MOST, patience: float = PATIENCE) -> None:
        super().__init__(
            handler,
            access_log=None,
            logger=_SILENT,
            keepalive_timeout=5.0,
            max_line_size=4096,
            max_field_size=_FIELD,
            auto_decompress=False,  # few bytes could become many
        )
        self._most = most
        self._patience = patience
        self._strangers: dict[web.RequestHandler, float] = {}  # in order of arrival
        self._sweeper: asyncio.TimerHandle | None = None

    def __call__(self) -> web.RequestHandler:
        visitor = _Visitor(self, loop=self._loop, **self._kwargs)
        visitor.allowance = _ALLOWANCE
        return visitor

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._strangers[handler] = time.monotonic()
        if len(self._strangers) > self._most:
            self._send_off(next(iter(self._strangers)))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._patience / 4, self._sweep)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._strangers.pop(handler, None)
        super().connection_lost(handler, exc)

    def trust(self, request: web.BaseRequest) -> None:
        visitor = request.protocol
        self._strangers.pop(visitor, None)
        if isinstance(visitor, _Visitor):
            visitor.allowance = None

    def _sweep(self) -> None:
        late = time.monotonic() - self._patience
        for handler, since in list(self._strangers.items()):
            if since > late:
                break  # those after it came later
            self._send_off(handler)
        again = bool(self._strangers)
        self._sweeper = self._loop.call_later(self._patience / 4, self._sweep) if again else None

    def _send_off(self, handler: web.RequestHandler) -> None:
        self._strangers.pop(handler, None)
        _turn_away(handler)


def _turn_away(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
