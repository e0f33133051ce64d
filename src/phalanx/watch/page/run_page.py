"""The answers about one run.

GET /live        the whole state, then every change (protocol.py), as server-sent events
GET /log, /search, /why, /metrics
No request changes anything.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from phalanx.watch import prometheus
from phalanx.watch.page import guard, site
from phalanx.watch.page.site import Answer, QuestionError
from phalanx.watch.page.subscribers import Subscribers
from phalanx.watch.source import Source, Stream, WhyAnswer

_PART = 1 << 16  # bytes of a log
_MOST_FOUND = 1000
_FRESH = 2.0  # seconds for which an answer to `why` is reused: it needs the stacks of all ranks
_PAST = 5.0  # seconds to read past events before /metrics is answered
_SOON = 0.5  # the same, before /live is answered


class RunPage:
    """Answers requests about one run. `subscribers.follow` applies its events."""

    def __init__(self, source: Source) -> None:
        self.subscribers = Subscribers(source)
        self._source = source
        self._asking = asyncio.Lock()
        self._why_answer: tuple[float, WhyAnswer] | None = None
        self.routes: dict[tuple[str, str], Answer] = {
            ("GET", "/live"): self.live,
            ("GET", "/log"): self._log,
            ("GET", "/search"): self._search,
            ("GET", "/why"): self._why,
            ("GET", "/metrics"): self._metrics,
        }

    async def live(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send updates until the browser leaves or the run ends."""
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
            raise QuestionError("stream is stdout or stderr")
        start = site.number(query.get("start")) if query.get("start") else None
        size = min(site.number(query.get("size") or str(_PART)), _PART)
        chosen: Stream = "stdout" if stream == "stdout" else "stderr"
        return site.json(await self._source.log(site.number(query.get("rank")), chosen, start=start, size=size))

    async def _search(self, request: web.BaseRequest) -> web.StreamResponse:
        text, chosen = request.query.get("text", ""), request.query.get("ranks", "")
        if not text:
            raise QuestionError("text is missing")
        ranks = [site.number(rank) for rank in chosen.split(",")] if chosen else None
        most = min(site.number(request.query.get("most") or "200"), _MOST_FOUND)
        return site.json(await self._source.search(text, ranks, most=most))

    async def _why(self, _: web.BaseRequest) -> web.StreamResponse:
        async with self._asking:
            if self._why_answer is None or time.monotonic() - self._why_answer[0] > _FRESH:
                answer = await self._source.why()
                self._why_answer = (time.monotonic(), answer)
            return site.json(self._why_answer[1])

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        await self.subscribers.settled(_PAST)
        text = prometheus.text(self.subscribers.model)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
