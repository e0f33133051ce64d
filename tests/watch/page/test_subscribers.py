"""Every browser gets the whole state once, then every change; a slow one gets the whole state again."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from phalanx.contract import events
from phalanx.watch.model import simulation
from phalanx.watch.model.rank import RankView
from phalanx.watch.page import subscribers, updates
from phalanx.watch.page.protocol import RankRow
from phalanx.watch.page.subscribers import Subscribers


class Feed:
    """A source whose events the test controls."""

    run = "train-simulated"
    alive = True

    def __init__(self) -> None:
        self.queue: asyncio.Queue[events.AnyEvent] = asyncio.Queue()

    async def events(self) -> AsyncIterator[events.AnyEvent]:
        while True:
            yield await self.queue.get()


class Browser(web.StreamResponse):
    """A browser that reads on request."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = asyncio.Event()
        self.reads.set()
        self.got: list[tuple[str, Any]] = []
        self.when: list[float] = []

    async def write(self, data: bytes | bytearray | memoryview[Any]) -> None:  # type: ignore[override]
        await self.reads.wait()
        words = dict(line.split(": ", 1) for line in bytes(data).decode().splitlines() if ": " in line)
        if "event" in words:
            self.got.append((words["event"], json.loads(words["data"])))
            self.when.append(time.monotonic())

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.got]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("limit", "most"), [("_BEHIND", 5), ("_BEHIND_BYTES", 5000)])
def test_a_slow_browser_delays_no_other_and_gets_the_whole_state_again(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(subscribers, limit, most)
    monkeypatch.setattr(subscribers, "EVERY", 0.0)

    async def work() -> None:
        feed = Feed()
        people = Subscribers(feed)  # type: ignore[arg-type]
        following = asyncio.create_task(people.follow())
        for event in simulation.begin(2, now=1.0):
            feed.queue.put_nowait(event)
        await people.settled(10.0)
        quick, slow = Browser(), Browser()
        shown = [asyncio.create_task(people.show(browser, None)) for browser in (quick, slow)]
        await until(lambda: quick.got and slow.got)
        slow.reads.clear()
        for number in range(30):
            for event in simulation.second(number % 15, 2, now=2.0 + number):
                feed.queue.put_nowait(event)
            await until(lambda number=number: quick.got[-1][1].get("at") == 2.0 + number)  # type: ignore[misc]
        assert quick.names == ["whole", *["update"] * (len(quick.got) - 1)]
        slow.reads.set()
        await until(lambda: slow.got[-1][1]["at"] == 31.0)
        # The update that it had begun to read, and then the whole state; nothing in it is repeated.
        assert slow.names.count("whole") == 2
        assert slow.names.index("whole", 1) <= 2
        points = [
            tuple(point)
            for name, message in slow.got[slow.names.index("whole", 1) :]
            for point in message["curves"]["loss"]
        ]
        assert len(points) == len(set(points))
        feed.queue.put_nowait(events.RunEnded(time=40.0, code=0, seconds=39.0))
        await asyncio.gather(following, *shown)
        for browser in (quick, slow):
            assert browser.names[-2:] == ["update", "end"]
            assert browser.got[-2][1]["head"]["code"] == 0

    asyncio.run(work())


def test_an_event_is_reported_at_once_and_many_together() -> None:
    async def work() -> None:
        feed = Feed()
        people = Subscribers(feed)  # type: ignore[arg-type]
        following = asyncio.create_task(people.follow())
        for event in simulation.begin(2, now=1.0):
            feed.queue.put_nowait(event)
        await people.settled(10.0)
        browser = Browser()
        shown = asyncio.create_task(people.show(browser, None))
        await until(lambda: browser.got)
        for number in range(200):
            feed.queue.put_nowait(events.NoteEvent(time=10.0 + number, text=f"{number}"))
            await asyncio.sleep(0.001)
        feed.queue.put_nowait(events.RunEnded(time=400.0, code=0, seconds=39.0))
        await asyncio.gather(following, shown)
        updates = [message for name, message in browser.got if name == "update"]
        took = browser.when[-1] - browser.when[0]
        assert len(updates) <= took / subscribers.EVERY + 3
        message = [each["text"] for update in updates for each in update.get("events", ())]
        assert [text for text in message if text.isdigit()] == [str(number) for number in range(200)]

    asyncio.run(work())


def test_rows_use_a_bounded_share_of_a_core_and_delay_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of thousands of ranks are expensive: they are sent less often."""
    monkeypatch.setattr(subscribers, "EVERY", 0.0)
    row, spend = updates._row, threading.Event()

    def expensive(view: RankView) -> RankRow:
        until = time.thread_time() + 0.05 * spend.is_set()
        while time.thread_time() < until:
            pass
        return row(view)

    monkeypatch.setattr(updates, "_row", expensive)

    async def work() -> None:
        feed, browser = Feed(), Browser()
        people = Subscribers(feed)  # type: ignore[arg-type]
        following = asyncio.create_task(people.follow())
        for event in simulation.begin(2, now=1.0):
            feed.queue.put_nowait(event)
        await people.settled(10.0)
        shown = asyncio.create_task(people.show(browser, None))
        await until(lambda: browser.got)
        spend.set()
        (sample, *_) = simulation.second(1, 2, now=3.0)
        feed.queue.put_nowait(sample)
        await until(lambda: len(browser.got) == 2)
        assert people._rows_due - people._sent_at > 0.3
        people._rows_due += 1000
        feed.queue.put_nowait(simulation.second(2, 2, now=4.0)[0])
        feed.queue.put_nowait(events.NoteEvent(time=4.0, text="at once"))
        await until(lambda: "events" in browser.got[-1][1])
        assert "rows" not in browser.got[-1][1]
        timer = people._rows_timer
        assert timer is not None
        feed.queue.put_nowait(events.NoteEvent(time=4.1, text="at once, too"))  # it does not wait for the rows
        await until(lambda: "at once, too" in str(browser.got[-1][1].get("events")))
        assert timer.cancelled()  # one timer at a time
        people._rows_due = time.monotonic() + 0.3
        feed.queue.put_nowait(events.NoteEvent(time=4.2, text="the rows follow"))
        await until(lambda: "rows" in browser.got[-1][1])
        assert "events" not in browser.got[-1][1]
        feed.queue.put_nowait(events.NoteEvent(time=4.3, text="no row has changed"))
        await until(lambda: "no row has changed" in str(browser.got[-1][1].get("events")))
        assert people._rows_timer is None
        following.cancel()
        shown.cancel()
        await asyncio.gather(following, shown, return_exceptions=True)

    asyncio.run(work())


def test_a_browser_that_comes_at_the_end_gets_the_final_rows() -> None:
    async def work() -> None:
        feed, browser = Feed(), Browser()
        people = Subscribers(feed)  # type: ignore[arg-type]
        people._rows_due = time.monotonic() + 1000
        following = asyncio.create_task(people.follow())
        for event in (*simulation.begin(2, now=1.0), events.RunEnded(time=9.0, code=0, seconds=8.0)):
            feed.queue.put_nowait(event)
        await following
        await people.show(browser, None)
        assert browser.names == ["whole", "end"]
        assert len(browser.got[0][1]["rows"]) == 2

    asyncio.run(work())
