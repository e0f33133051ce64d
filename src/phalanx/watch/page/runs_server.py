"""The server of `phalanx ui`: all runs of this machine in one page.

GET /            the list of runs (runs.html); GET /run?run=KEY the page of one (index.html)
GET /runs        the list, as JSON
GET /compare     runs=KEY,KEY: their curves and a table
POST /delete     a key as the body: deletes a run that has ended
GET /live, /log, /search, /why with run=KEY: see run_page.py

A run is named by a key from the list. No path comes from a browser.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter

import msgspec
from aiohttp import web

from phalanx.errors import UsageError
from phalanx.watch.html import comparison
from phalanx.watch.html.comparison import ComparedRun, ComparisonCell
from phalanx.watch.page import address, server, site
from phalanx.watch.page.address import PageAddress
from phalanx.watch.page.keys import PageKeys
from phalanx.watch.page.run_page import RunPage
from phalanx.watch.page.site import Answer, QuestionError, Site
from phalanx.watch.run_list import RunEntry, RunList

MOST = 8  # runs that are compared at a time
_LONGEST_KEY = 64  # characters
_CURVES = 60
_POINTS = 1000  # per curve
_LAST = 1.0  # seconds to send the end to browsers


class RunsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /runs."""

    now: float
    host: str
    runs: list[RunEntry]


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /compare."""

    names: list[str]  # of the runs
    table: list[tuple[str, list[ComparisonCell]]]
    curves: dict[str, list[list[tuple[int, float, float]]]]  # for each run: step, seconds since its start, value


def serve(runs: RunList, at: str | None, key: str) -> int:
    """Serve the list until Ctrl-C."""
    where = address.parse(at)
    with address.listen(where) as sock:
        return asyncio.run(_served(runs, where, PageKeys(key, sock.getsockname()[1], "ui"), sock))


async def _served(listed: RunList, where: PageAddress, own: PageKeys, sock: socket.socket) -> int:
    runs = RunsServer(listed, where, own)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.ServerRunner(runs.gate, handle_signals=False, shutdown_timeout=_LAST)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        server.announce(where, sock, own.key)
        await stop.wait()
    finally:
        await runner.cleanup()
        await runs.end()
    return 0


class RunsServer:
    """Answers questions about all runs, and deletes those that have ended."""

    def __init__(self, runs: RunList, where: PageAddress, own: PageKeys) -> None:
        self._runs = runs
        self._pages: dict[str, tuple[RunPage, asyncio.Task[None]]] = {}  # pages that browsers are showing
        self._browsers: Counter[str] = Counter()  # number of browsers per page
        self._listing = asyncio.Lock()
        routes: dict[tuple[str, str], Answer] = {
            ("GET", "/runs"): self._list,
            ("GET", "/compare"): self._compare,
            ("POST", "/delete"): self._delete,
            ("GET", "/live"): self._live,
            **{("GET", path): self._about_run for path in ("/log", "/search", "/why")},
        }
        self._keys = own
        self.gate = Site(where, own, {"/": "runs.html", "/run": "index.html"}, routes).gate

    async def end(self) -> None:
        """Stop following runs."""
        tasks = [task for _, task in self._pages.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _list(self, _: web.BaseRequest) -> web.StreamResponse:
        async with self._listing:  # several browsers: the files are read once at a time
            entries = await asyncio.to_thread(self._runs.entries)
        return site.json(RunsAnswer(now=time.time(), host=os.uname().nodename, runs=entries))

    async def _compare(self, request: web.BaseRequest) -> web.StreamResponse:
        keys = request.query.get("runs", "").split(",")
        if not 1 <= len(keys) <= MOST or not all(0 < len(key) <= _LONGEST_KEY for key in keys):
            raise QuestionError(f"compare takes 1 to {MOST} runs")
        try:
            compared = [await asyncio.to_thread(self._runs.compared, key) for key in keys]
        except UsageError as error:
            raise QuestionError(str(error)) from None
        return site.json(_comparison(compared))

    async def _delete(self, request: web.BaseRequest) -> web.StreamResponse:
        length = request.content_length
        if length is None or not 0 < length <= _LONGEST_KEY:
            raise QuestionError("expected the key of a run")
        key = (await request.read()).decode(errors="replace")
        try:
            await asyncio.to_thread(self._runs.delete, key)
        except UsageError as error:
            raise QuestionError(str(error)) from None
        return web.Response(status=204)

    def _page(self, request: web.BaseRequest) -> tuple[str, RunPage]:
        key = request.query.get("run", "")
        if key in self._pages:
            return key, self._pages[key][0]
        try:
            return key, RunPage(self._runs.source(key))
        except UsageError as error:
            raise QuestionError(str(error)) from None

    async def _about_run(self, request: web.BaseRequest) -> web.StreamResponse:
        _, page = self._page(request)
        return await page.routes["GET", self._keys.within(request.path)](request)

    async def _live(self, request: web.BaseRequest) -> web.StreamResponse:
        """Follow a run while a browser shows it."""
        key, page = self._page(request)
        if key not in self._pages:
            self._pages[key] = (page, asyncio.create_task(page.subscribers.follow()))
        self._browsers[key] += 1
        try:
            return await page.live(request)
        finally:
            self._browsers[key] -= 1
            if not self._browsers[key]:
                del self._browsers[key]
                _, task = self._pages.pop(key)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _comparison(runs: list[ComparedRun]) -> RunComparison:
    names = dict.fromkeys([runs[0].metric, *(name for run in runs for name in run.known)])
    rest = dict.fromkeys(name for run in runs for name in run.curves)
    wanted = [name for name in {**names, **rest} if any(run.curves.get(name) for run in runs)][:_CURVES]
    return RunComparison(
        names=[run.run for run in runs],
        table=comparison.table(runs),
        curves={name: [_thinned(run.curves.get(name, [])) for run in runs] for name in wanted},
    )


def _thinned(points: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    every = -(-len(points) // _POINTS) or 1
    return points if every == 1 else [*points[:-1:every], points[-1]]
