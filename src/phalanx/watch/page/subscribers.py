"""The browsers that show the page.

Each gets the whole state once, then every change. A slow browser gets the whole state again.
"""

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
_SHARE = 0.2  # of a core that rows of ranks may use: those of thousands of ranks are sent less often
HEARTBEAT = 10.0  # seconds without an update after which a comment is sent
_BEHIND = 90  # updates that may be queued for a browser
_BEHIND_BYTES = 1 << 24  # bytes of these: one update of 32,768 ranks has 6 MB
_WRITE_TIMEOUT = 20.0  # seconds
_BATCH = 64  # events that are folded before other tasks run
_QUIET = 0.05  # seconds without an event after which past events are assumed to be read


class SseSubscriber:
    """A browser, and the data still to be sent to it."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.waiting: deque[bytes] = deque()
        self.needs_whole = True  # it needs the whole state

    def send(self, data: bytes) -> None:
        """Queue `data`. A browser that is too far behind gets the whole state instead."""
        if len(self.waiting) >= _BEHIND or sum(map(len, self.waiting)) > _BEHIND_BYTES:
            self.waiting.clear()
            self.needs_whole = True
        if not self.needs_whole:
            self.waiting.append(data)
        self.changed.set()


class Subscribers:
    """All browsers of a run. `follow` folds the events of the run; `show` sends updates to one browser."""

    def __init__(self, source: Source) -> None:
        self.model = RunModel()
        self.ended = asyncio.Event()  # no more events
        self._source = source
        self._updates = Updates(self.model)
        self._subscribers: set[SseSubscriber] = set()
        self._due: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._rows_timer: asyncio.TimerHandle | None = None
        self._rows_due = 0.0  # when rows of ranks may be sent again
        self._last_event = 0.0  # when it came

    @property
    def full(self) -> bool:
        """Whether the maximum number of browsers is reached."""
        return len(self._subscribers) >= MOST

    async def follow(self) -> None:
        """Fold the events of the run until it ends."""
        try:
            folded = 0
            async for event in self._source.events():
                self._apply(event)
                folded += 1
                if folded % _BATCH == 0:
                    await asyncio.sleep(0)
                if isinstance(event, RunEnded):
                    break
        finally:
            self.ended.set()
            self._send_update()
            for subscriber in self._subscribers:
                subscriber.changed.set()

    async def settled(self, limit: float) -> None:
        """Wait until past events are folded, at most `limit` seconds: a new server reads them first."""
        end = time.monotonic() + limit
        while not self.ended.is_set() and time.monotonic() < end:
            if self._last_event and time.monotonic() - self._last_event > _QUIET:
                return
            await asyncio.sleep(_QUIET / 2)

    def _apply(self, event: AnyEvent) -> None:
        self.model.apply(event)
        self._last_event = time.monotonic()
        if self._due is None:
            # Send at once, unless an update was sent just now; in that case collect changes.
            self._due = self._send_at(self._sent_at + EVERY)

    def _send_at(self, when: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._send_update)

    def _send_update(self) -> None:
        for timer in (self._due, self._rows_timer):
            if timer is not None:
                timer.cancel()
        self._due = self._rows_timer = None
        self._sent_at = time.monotonic()
        if not self._subscribers:
            return
        began, rows = time.thread_time(), self.ended.is_set() or self._sent_at >= self._rows_due
        update = self._updates.next(rows=rows)
        if update is not None:
            data = _event("update", update)
            for subscriber in self._subscribers:
                subscriber.send(data)
        if rows:
            self._rows_due = time.monotonic() + (time.thread_time() - began) / _SHARE
        elif self._updates.rows_changed:
            self._rows_timer = self._send_at(self._rows_due)

    async def show(self, response: web.StreamResponse, transport: asyncio.Transport | None) -> None:
        """Send updates to one browser until it leaves or the run ends."""
        subscriber = SseSubscriber()
        self._subscribers.add(subscriber)
        try:
            while True:
                while subscriber.needs_whole or subscriber.waiting:
                    await asyncio.wait_for(response.write(self._next(subscriber)), _WRITE_TIMEOUT)
                if self.ended.is_set():
                    await asyncio.wait_for(response.write(b"event: end\ndata: {}\n\n"), _WRITE_TIMEOUT)
                    return
                subscriber.changed.clear()
                try:
                    await asyncio.wait_for(subscriber.changed.wait(), HEARTBEAT)
                except TimeoutError:
                    await asyncio.wait_for(response.write(b": heartbeat\n\n"), _WRITE_TIMEOUT)
        except (OSError, TimeoutError):  # the browser has left or does not read
            if transport is not None:
                transport.abort()
        finally:
            self._subscribers.discard(subscriber)

    def _next(self, subscriber: SseSubscriber) -> bytes:
        if not subscriber.needs_whole:
            return subscriber.waiting.popleft()
        self._send_update()  # to the others: the next update must not repeat what the whole state contains
        subscriber.needs_whole = False
        subscriber.waiting.clear()
        return b"retry: 1000\n" + _event("whole", self._updates.whole())


def _event(name: str, update: PageUpdate) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(update))
