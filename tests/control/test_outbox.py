"""Messages that wait to be sent, and nodes that do not read them."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from phalanx.control import outbox
from phalanx.control.leader.liveness import Timing
from phalanx.control.messages import NoteMessage, Pong
from phalanx.control.outbox import LimitExceededError, Outbox
from tests.control.parties import RawClient, joined, leading, raw_client, until

LINE = NoteMessage(text="x" * 60_000)


def test_bytes_are_counted_until_they_are_acknowledged() -> None:
    async def scene() -> None:
        sent: list[bytes] = []

        async def send(content: bytes) -> None:
            sent.append(content)

        box = Outbox(limit=10)
        for content in (b"aaa", b"bbb", b"ccc"):
            box.put(content)
        with pytest.raises(LimitExceededError, match="it has not read"):
            box.put(b"dd")
        sending = asyncio.create_task(box.send_all(send))
        await asyncio.sleep(0)
        assert (sent, box.unsent, box.size) == ([b"aaa", b"bbb", b"ccc"], 0, 9)
        box.acknowledge(2)
        assert box.size == 3
        box.acknowledge(1)  # late
        box.acknowledge(1000)  # more than was sent
        assert box.size == 0
        box.put(b"dddddddddd")
        box.end()
        await sending
        assert sent[-1] == b"dddddddddd"
        assert box.size == 10
        box.clear()
        assert box.size == 0

    asyncio.run(scene())


def test_it_is_known_for_how_long_a_node_does_not_read() -> None:
    async def scene() -> None:
        reads = asyncio.Event()

        async def send(content: bytes) -> None:
            await reads.wait()

        box = Outbox()
        assert box.stalled(time.monotonic()) == 0
        sending = asyncio.create_task(box.send_all(send))
        box.put(b"x")
        await asyncio.sleep(0.01)
        now = time.monotonic()
        assert 0 < box.stalled(now) < 60
        box.excuse(box.stalled(now))
        assert box.stalled(now) == 0
        reads.set()
        await asyncio.sleep(0.01)
        assert box.stalled(time.monotonic()) == 0
        sending.cancel()

    asyncio.run(scene())


def stop_reading(client: RawClient) -> None:
    connection = client.ws._response.connection
    assert connection is not None
    assert connection.transport is not None
    connection.transport.pause_reading()


def test_a_member_that_does_not_read_is_dropped_alone() -> None:
    async def meet() -> None:
        async with leading(3) as led, joined(led.port, 2) as (good, events), raw_client(led.port) as client:
            await client.enter(1)
            await led.leader.wait_for_members(60)
            stop_reading(client)
            one = led.members.connected[1]
            for _ in range(outbox.LIMIT // 60_000 + 1):
                led.members.send(1, LINE)
            assert one.outbox.size == 0  # nothing is stored for it
            await until(lambda: led.events.gone)
            assert led.events.gone == ["1: it has not read 64 MiB that were sent to it"]
            assert led.ids == {2}
            led.members.broadcast(LINE)
            await until(lambda: events.from_leader == [LINE])
            assert good.backlog < 1000

    asyncio.run(meet())


def test_a_member_that_writes_but_does_not_read_is_lost() -> None:
    async def meet() -> None:
        async with leading(timing=Timing(ping=0.1, node_timeout=1.5)) as led, raw_client(led.port) as client:
            await client.enter(1)
            await led.leader.wait_for_members(60)
            stop_reading(client)
            for _ in range(300):  # more than the kernel buffers
                led.members.send(1, LINE)
            while not led.events.gone:
                await client.send(Pong(ping=0.0, time=0.0))
                await asyncio.sleep(0.1)
            (why,) = led.events.gone
            assert re.fullmatch(r"1: it has not read what was sent to it for \d+ s \(--node-timeout\)", why)

    asyncio.run(meet())


def test_the_end_does_not_wait_for_a_member_that_does_not_read() -> None:
    async def meet() -> None:
        async with leading() as led, raw_client(led.port) as client:
            await client.enter(1)
            await led.leader.wait_for_members(60)
            stop_reading(client)
            for _ in range(300):
                led.members.send(1, LINE)
            async with asyncio.timeout(60):
                await led.leader.close()
            assert not led.ids

    asyncio.run(meet())
