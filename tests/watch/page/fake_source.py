"""A run that a test simulates, on the real server of the page."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web
from playwright.async_api import Browser, Page

from benchmarks.common.browser import collect_errors, wait_for
from phalanx.contract.events import AnyEvent
from phalanx.watch.model import simulation
from phalanx.watch.page import address, server
from phalanx.watch.page.keys import PageKeys
from phalanx.watch.source import LogPart, SearchResult, Stream, WhyAnswer

KEY = "k" * 43


class Made:
    """A Source of given events."""

    alive = True

    def __init__(self, ranks: int = 4, run: str = "train-simulated") -> None:
        self.run = run
        self.ranks = ranks
        self.output: dict[tuple[int, Stream], str] = {}
        self.because = WhyAnswer(report="")
        self.asked: list[str] = []
        self._past: list[AnyEvent] = []
        self._news = asyncio.Event()

    async def tell(self, *events: AnyEvent) -> None:
        self._past += events
        self._news.set()
        await asyncio.sleep(0)

    async def seconds(self, first: int, last: int | None = None, *, ago: float = 0.0) -> None:
        """Yield these seconds of the simulation, up to now, or up to a time in the past."""
        last = first if last is None else last
        for number in range(first, last + 1):
            await self.tell(*simulation.second(number, self.ranks, now=time.time() - ago - (last - number)))

    async def events(self) -> AsyncIterator[AnyEvent]:
        sent = 0
        while True:
            while sent < len(self._past):
                yield self._past[sent]
                sent += 1
            self._news.clear()
            await self._news.wait()

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = 1 << 16) -> LogPart:
        self.asked.append(f"log {rank} {stream} {start}")
        data = self.output.get((rank, stream), "").encode()
        first = max(0, len(data) - size) if start is None else min(start, len(data))
        part = data[first : first + size]
        return LogPart(start=first, end=first + len(part), text=part.decode())

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        self.asked.append(f"search {text} {ranks}")
        return [
            SearchResult(rank=rank, stream=stream, at=output.index(line), line=line)
            for (rank, stream), output in self.output.items()
            for line in output.splitlines()
            if text in line and (ranks is None or rank in ranks)
        ][:most]

    async def why(self) -> WhyAnswer:
        self.asked.append("why")
        return self.because


async def begun(ranks: int = 4, **options: str) -> Made:
    """Yield the events until all ranks exist, without any step."""
    made = Made(ranks, **options)
    await made.tell(*simulation.begin(ranks, now=time.time() - 60))
    return made


@contextlib.asynccontextmanager
async def served(source: Made, port: int = 0, *, key: str = KEY) -> AsyncIterator[str]:
    """Serve the page; yield the address without the key."""
    where = address.parse(f"127.0.0.1:{port}")
    sock = address.listen(where)
    page = server.PageServer(source, where, PageKeys(key, sock.getsockname()[1]))
    runner = web.ServerRunner(page.gate, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    following = asyncio.create_task(page.subscribers.follow())
    try:
        await web.SockSite(runner, sock).start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        await runner.cleanup()  # first: the browser gets no message, as if the process was killed
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def looked_at(chromium: Browser, source: Made, **options: Any) -> AsyncIterator[Page]:
    """Open the page and wait until all ranks are visible. It must report no error. `options`: of new_page."""
    errors: list[str] = []
    async with served(source) as address, opened(chromium, address + "#" + KEY, errors=errors, **options) as page:
        await wait_for(page, "window.phalanx?.firstPaint && document.querySelector('.row.rank')")
        yield page
        assert errors == []


@contextlib.asynccontextmanager
async def opened(
    chromium: Browser, url: str, *, errors: list[str] | None = None, **options: Any
) -> AsyncIterator[Page]:
    """Open a page with its own cookies. Its errors are added to `errors`."""
    # Without motion, so that buttons do not move.
    page = await chromium.new_page(
        **{"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce", **options}
    )
    try:
        collect_errors(page, errors)
        await page.goto(url)
        yield page
    finally:
        await page.close()
