"""The server of the page, for `phalanx watch --page` and `phalanx run --page`.

GET /            the shell, which contains nothing of the run, and /assets/…
POST /enter      exchanges the key for a cookie and the folder below which it is valid
GET /live        the whole state, then every change (protocol.py), as server-sent events
GET /log, /search, /why, /metrics
No request changes anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from phalanx.contract import encoding
from phalanx.control.leader.connection_gate import ConnectionGate
from phalanx.errors import PhalanxError, UsageError
from phalanx.watch import prometheus
from phalanx.watch.page import address, guard, keys
from phalanx.watch.page.address import PageAddress
from phalanx.watch.page.keys import PageKeys
from phalanx.watch.page.subscribers import Subscribers
from phalanx.watch.source import Source, Stream, WhyAnswer

_ASSETS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}
logger = logging.getLogger(__name__)

_LONGEST_KEY = 1024  # characters
_PART = 1 << 16  # bytes of a log
_MOST_FOUND = 1000
_FRESH = 2.0  # seconds for which an answer to `why` is reused: it needs the stacks of all ranks
_PAST = 5.0  # seconds to read past events before /metrics is answered
_SOON = 0.5  # the same, before /live is answered
_LAST = 1.0  # seconds to send the end to browsers

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def serve(source: Source, at: str | None = None, fd: int | None = None, key: str | None = None) -> int:
    """Serve the page until Ctrl-C. With `fd`, a listening socket of `phalanx run`: until the run ends."""
    where = address.parse(at)
    key = key or keys.new()
    sock = address.listen(where) if fd is None else socket.socket(fileno=fd)
    with sock:
        if fd is None:
            sys.stdout.write(address.link(where, sock, key) + "\n")
            if not where.loopback:
                sys.stdout.write(f"{where.warning}\n")
            sys.stdout.flush()
        return asyncio.run(_served(source, where, key, sock, stays=fd is None))


async def _served(source: Source, where: PageAddress, key: str, sock: socket.socket, *, stays: bool) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    page = PageServer(source, where, PageKeys(key, sock.getsockname()[1], source.run))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.ServerRunner(page.gate, handle_signals=False, shutdown_timeout=_LAST)
    await runner.setup()
    following = asyncio.create_task(page.subscribers.follow())
    stopping = asyncio.create_task(stop.wait())
    try:
        await web.SockSite(runner, sock).start()
        await asyncio.wait({stopping, following}, return_when=asyncio.FIRST_COMPLETED)
        if stays:
            if following.done() and following.exception() is not None:
                sys.stderr.write(f"phalanx: no more events: {following.exception()}\n")
            await stopping
    finally:
        following.cancel()
        stopping.cancel()
        await asyncio.gather(following, stopping, return_exceptions=True)
        await runner.cleanup()
    if not stays and following.done() and not following.cancelled() and following.exception() is not None:
        raise following.exception() or AssertionError
    return 0


class PageServer:
    """Answers the requests of browsers and of Prometheus."""

    def __init__(self, source: Source, where: PageAddress, own: PageKeys) -> None:
        self.subscribers = Subscribers(source)
        self.gate = ConnectionGate(self._handle, guard.LIMITS)
        self._source = source
        self._keys = own
        self._names = address.names(where)
        self._digits = where.everywhere
        self._assets = _assets()
        self._asking = asyncio.Lock()
        self._why_answer: tuple[float, WhyAnswer] | None = None
        self._routes: dict[tuple[str, str], Answer] = {
            ("GET", "/live"): self._live,
            ("GET", "/log"): self._log,
            ("GET", "/search"): self._search,
            ("GET", "/why"): self._why,
            ("GET", "/metrics"): self._metrics,
        }

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        why = guard.foreign(request, self._names, digits=self._digits)
        if why:
            return guard.refused(403, why)
        path, method = self._keys.within(request.path), request.method
        if path == "/enter":
            return await self._enter(request)
        if path == "/" or path.startswith("/assets/"):
            return self._shell(request, "index.html" if path == "/" else path.removeprefix("/assets/"))
        answer = self._routes.get((method, path))
        if not guard.entitled(request, self._keys, bearer=path == "/metrics"):
            return guard.refused(401, "the key is missing: open the link that phalanx printed")
        self.gate.trust(request)
        if answer is None:
            return guard.refused(404, "not found")
        try:
            return guard.sealed(await answer(request))
        except _QuestionError as error:
            return guard.refused(400, str(error))
        except PhalanxError as error:
            return guard.refused(503, str(error))
        except ConnectionError:
            raise  # the browser is gone
        except Exception:  # a bug here must not end the server
            logger.exception("%s %s failed", method, path)
            return guard.refused(500, "internal error: see the output of the server")

    async def _enter(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "POST":
            return guard.refused(405, "POST the key")
        length = request.content_length
        if length is None or length > _LONGEST_KEY:
            return guard.refused(413, "not a key")
        if not self._keys.opens((await request.read()).decode(errors="replace").strip()):
            return guard.refused(403, "not the key of this run")
        self.gate.trust(request)
        folder = self._keys.folder
        response = web.Response(status=204, headers={"Content-Location": f"{folder}/"})
        response.set_cookie(
            self._keys.cookie_name, self._keys.cookie, path=f"/{folder}/", httponly=True, samesite="Strict"
        )
        return guard.sealed(response)

    def _shell(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        """Return a static file. Names are looked up in a table, never as paths."""
        if request.method not in ("GET", "HEAD"):
            return guard.refused(405, "GET it")
        if name not in self._assets:
            return guard.refused(404, "not found")
        content, kind, tag = self._assets[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return guard.sealed(web.Response(status=304, headers=headers))
        charset = "utf-8" if not kind.startswith("image/p") else None
        return guard.sealed(web.Response(body=content, content_type=kind, charset=charset, headers=headers))

    async def _live(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.subscribers.full:
            return guard.refused(503, "too many browsers look at this run already")
        response = guard.sealed(
            web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        )
        await response.prepare(request)
        await self.subscribers.settled(_SOON)
        await self.subscribers.show(response, request.transport)
        return response

    async def _log(self, request: web.BaseRequest) -> web.StreamResponse:
        query = request.query
        stream = query.get("stream", "stdout")
        if stream not in ("stdout", "stderr"):
            raise _QuestionError("stream is stdout or stderr")
        start = _number(query.get("start")) if query.get("start") else None
        size = min(_number(query.get("size") or str(_PART)), _PART)
        chosen: Stream = "stdout" if stream == "stdout" else "stderr"
        return _json(await self._source.log(_number(query.get("rank")), chosen, start=start, size=size))

    async def _search(self, request: web.BaseRequest) -> web.StreamResponse:
        text, chosen = request.query.get("text", ""), request.query.get("ranks", "")
        if not text:
            raise _QuestionError("text is missing")
        ranks = [_number(rank) for rank in chosen.split(",")] if chosen else None
        most = min(_number(request.query.get("most") or "200"), _MOST_FOUND)
        return _json(await self._source.search(text, ranks, most=most))

    async def _why(self, _: web.BaseRequest) -> web.StreamResponse:
        async with self._asking:
            if self._why_answer is None or time.monotonic() - self._why_answer[0] > _FRESH:
                answer = await self._source.why()
                self._why_answer = (time.monotonic(), answer)
            return _json(self._why_answer[1])

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        await self.subscribers.settled(_PAST)
        text = prometheus.text(self.subscribers.model)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


class _QuestionError(UsageError):
    pass


def _number(text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise _QuestionError(f"a whole number was expected, not {(text or 'nothing')[:40]!r}")
    return int(text)


def _json(content: Any) -> web.StreamResponse:
    return web.Response(body=encoding.encode(content), content_type="application/json", charset="utf-8")


def _assets() -> dict[str, tuple[bytes, str, str]]:
    """Return name -> content, type, ETag."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(_ASSETS):
            kind = _TYPES.get(os.path.splitext(entry.name)[1])
            if entry.is_file() and kind is not None:
                with open(entry.path, "rb") as file:
                    content = file.read()
                found[entry.name] = (content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found
