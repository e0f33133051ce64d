"""Whoever looks at the page: each gets everything once, then every change. Who is slow gets everything anew."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from aiohttp import web

from phalanx.contract.events import AnyEvent, RunEnded
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.page.protocol import PageUpdate
from phalanx.watch.page.updates import Updates, encode
from phalanx.watch.source import Source

MOST = 64  # browsers
EVERY = 1 / 30  # seconds between two updates, at least
HEARTBEAT = 10.0  # seconds without one, after which a comment says that we live
_BEHIND = 90  # updates that one may be behind
_PATIENCE = 20.0  # seconds for a browser to read
_AT_A_TIME = 64  # events that are folded before anything else has its turn
_QUIET = 0.05  # seconds without an event: what had happened before has been told


class SseSubscriber:
    """A browser."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.waiting: deque[bytes] = deque()
        self.begins = True  # it is to get everything

    def tell(self, data: bytes) -> None:
        if len(self.waiting) >= _BEHIND:
            self.waiting.clear()
            self.begins = True
        if not self.begins:
            self.waiting.append(data)
        self.news.set()


class Subscribers:
    def __init__(self, source: Source) -> None:
        self.scene = RunModel()
        self.ended = asyncio.Event()  # nothing more happens
        self._source = source
        self._updates = Updates(self.scene)
        self._onlookers: set[SseSubscriber] = set()
        self._due: asyncio.TimerHandle | None = None
        self._told = 0.0
        self._seen = 0.0  # when the last event came

    @property
    def full(self) -> bool:
        return len(self._onlookers) >= MOST

    async def follow(self) -> None:
        """The events of the run, until it ends."""
        try:
            folded = 0
            async for event in self._source.events():
                self._see(event)
                folded += 1
                if folded % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
                if isinstance(event, RunEnded):
                    break
        finally:
            self._tell()
            self.ended.set()
            for onlooker in self._onlookers:
                onlooker.news.set()

    async def settled(self, limit: float) -> None:
        """Until the scene is that of now: a server that has only just begun reads what has happened first."""
        end = time.monotonic() + limit
        while not self.ended.is_set() and time.monotonic() < end:
            if self._seen and time.monotonic() - self._seen > _QUIET:
                return
            await asyncio.sleep(_QUIET / 2)

    def _see(self, event: AnyEvent) -> None:
        self.scene.see(event)
        self._seen = time.monotonic()
        if self._due is None:
            # What comes together is told together; and at once, unless something was told only just now.
            wait = max(0.0, self._told + EVERY - time.monotonic())
            self._due = asyncio.get_running_loop().call_later(wait, self._tell)

    def _tell(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._told = time.monotonic()
        update = self._updates.next() if self._onlookers else None
        if update is None:
            return
        data = _event("update", update)
        for onlooker in self._onlookers:
            onlooker.tell(data)

    async def show(self, response: web.StreamResponse, transport: asyncio.Transport | None) -> None:
        """To one browser, for as long as it looks, or there is anything to see."""
        onlooker = SseSubscriber()
        self._onlookers.add(onlooker)
        try:
            while True:
                while onlooker.begins or onlooker.waiting:
                    await asyncio.wait_for(response.write(self._next(onlooker)), _PATIENCE)
                if self.ended.is_set():
                    await asyncio.wait_for(response.write(b"event: end\ndata: {}\n\n"), _PATIENCE)
                    return
                onlooker.news.clear()
                try:
                    await asyncio.wait_for(onlooker.news.wait(), HEARTBEAT)
                except TimeoutError:
                    await asyncio.wait_for(response.write(b": still here\n\n"), _PATIENCE)
        except (OSError, TimeoutError):  # it has gone, or does not read
            if transport is not None:
                transport.abort()
        finally:
            self._onlookers.discard(onlooker)

    def _next(self, onlooker: SseSubscriber) -> bytes:
        if not onlooker.begins:
            return onlooker.waiting.popleft()
        self._tell()  # to the others: what is in the whole must not be in the update that follows it
        onlooker.begins = False
        onlooker.waiting.clear()
        return b"retry: 1000\n" + _event("whole", self._updates.whole())


def _event(name: str, update: PageUpdate) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(update))
