"""Connections that break or are tampered with: the member reconnects, and no message is lost or duplicated."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.control import messages
from phalanx.control.leader.liveness import Timing
from phalanx.control.leader.members import JoinedMember
from phalanx.control.messages import JoinRequest, NoteMessage, Refusal, ResumeRequest
from phalanx.control.outbox import Outbox
from tests.control.parties import MemberEvents, RunningLeader, arrival, joined, leading, raw_client, until
from tests.control.recording_proxy import RecordingProxy

AGAIN = "connected to node 0 again: the connection had broken"
PATIENT = Timing(node_timeout=60.0)


def numbered(count: int) -> list[NoteMessage]:
    return [NoteMessage(text=str(number)) for number in range(count)]


def test_what_was_not_received_is_sent_again() -> None:
    async def scene() -> None:
        sent: list[bytes] = []

        async def send(content: bytes) -> None:
            sent.append(content)

        box = Outbox()
        for content in (b"a", b"b", b"c"):
            box.put(content)
        sending = asyncio.create_task(box.send_all(send))
        await asyncio.sleep(0)
        box.acknowledge(1)
        sending.cancel()
        assert not box.rewind(0)  # it has already acknowledged more
        assert not box.rewind(4)  # fewer messages were sent
        box.put(b"d")
        assert box.rewind(2)
        box.end()
        await box.send_all(send)
        assert sent == [b"a", b"b", b"c", b"c", b"d"]
        assert box.size == 2

    asyncio.run(scene())


def test_the_old_connection_takes_no_message_from_the_new_one() -> None:
    async def scene() -> None:
        sent: dict[str, list[bytes]] = {"old": [], "new": []}

        def ws(name: str) -> Any:
            async def send_bytes(content: bytes) -> None:
                sent[name].append(content)

            return SimpleNamespace(send_bytes=send_bytes)

        transport = asyncio.BaseTransport()
        member = JoinedMember(1, arrival(1), "", "", transport)
        member.writer = asyncio.create_task(member.write(ws("old")))
        member.send(b"a")
        await asyncio.sleep(0)
        assert member.resume(transport, received=1)  # the leader has not noticed yet that the connection broke
        member.send(b"b")
        member.writer = asyncio.create_task(member.write(ws("new")))
        await asyncio.sleep(0.01)
        assert sent == {"old": [b"a"], "new": [b"b"]}
        member.writer.cancel()

    asyncio.run(scene())


@pytest.mark.parametrize("fault", ["up", "down", "cut"])
def test_a_connection_that_breaks_is_replaced(fault: str) -> None:
    async def meet() -> None:
        proxy = RecordingProxy()
        async with leading(timing=PATIENT) as led, proxy.between(led.port), joined(proxy.port) as (one, events):
            await led.leader.wait_for_members(60)
            if fault == "cut":
                proxy.cut()
            else:
                proxy.changes[fault] = True
            for note in numbered(3):
                one.send(note)
                led.members.broadcast(note)
            await until(lambda: len(led.events.from_members) == 3 and len(events.from_leader) == 3, 60)
            assert [message for _, message in led.events.from_members] == events.from_leader == numbered(3)
            assert events.notes == [AGAIN]
            assert led.events.notes == ["node 1 (host1) has connected again: its connection had broken"]
            assert len(proxy.seen) == 2
        assert led.events.gone == events.gone == []

    asyncio.run(meet())


def test_every_message_arrives_once_and_in_order_whatever_breaks() -> None:
    async def disturb(events: MemberEvents, proxy: RecordingProxy) -> None:
        for way in ("cut", "up", "down", "down", "up", "cut"):
            before = len(events.notes)
            if way == "cut":
                proxy.cut()
            else:
                proxy.changes[way] = True
            await until(lambda before=before: len(events.notes) > before, 60)  # type: ignore[misc]
            await asyncio.sleep(0.01)

    async def talk(led: RunningLeader, one: object, notes: list[NoteMessage]) -> None:
        for number, note in enumerate(notes):
            one.send(note)  # type: ignore[attr-defined]
            led.members.broadcast(note)
            if number % 10 == 0:
                await asyncio.sleep(0.002)

    async def meet() -> None:
        proxy, notes = RecordingProxy(), numbered(3000)
        async with leading(timing=PATIENT) as led, proxy.between(led.port), joined(proxy.port) as (one, events):
            await led.leader.wait_for_members(60)
            await asyncio.gather(disturb(events, proxy), talk(led, one, notes))
            await until(lambda: len(led.events.from_members) == len(events.from_leader) == len(notes), 60)
            assert [message for _, message in led.events.from_members] == notes
            assert events.from_leader == notes

    asyncio.run(meet())


def test_another_holder_of_the_token_cannot_resume_a_connection() -> None:
    async def meet() -> None:
        async with leading() as led, joined(led.port, 1) as (one, events):
            await led.leader.wait_for_members(60)
            for session in (b"", b"x" * 16):
                async with raw_client(led.port) as client:
                    request = ResumeRequest(member=1, session=session, received=0)
                    await client.ws.send_bytes(messages.encode(request))
                    assert await client.answered() == Refusal(kind="gone", leader="the membership has ended")
            one.send(NoteMessage(text="undisturbed"))
            await until(lambda: led.events.from_members)
            assert events.notes == []

    asyncio.run(meet())


def test_a_member_that_cannot_come_again_is_lost_on_both_sides() -> None:
    async def meet() -> None:
        proxy = RecordingProxy()
        async with leading(timing=Timing(node_timeout=2.0)) as led, contextlib.AsyncExitStack() as way:
            await way.enter_async_context(proxy.between(led.port))
            async with joined(proxy.port) as (_, events):
                await led.leader.wait_for_members(60)
                await way.aclose()
                await until(lambda: events.gone and led.events.gone, 60)
                assert "closed" in events.gone[0] or "broke" in events.gone[0]
                assert not led.ids

    asyncio.run(meet())


def test_an_agent_that_has_ended_is_lost_at_once_and_not_probed_again() -> None:
    """Its host refuses connections to the port on which it would have become the leader."""

    async def scene() -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))  # reserved, but nothing listens
            info = arrival(1, failover_port=reserved.getsockname()[1])
            async with leading(timing=PATIENT) as led, raw_client(led.port) as client:
                join = JoinRequest(protocol=messages.PROTOCOL, info=messages.encode(info))
                await client.ws.send_bytes(messages.encode(join))
                await led.leader.wait_for_members(60)
                assert led.members.failover_endpoints[1] == ("127.0.0.1", info.failover_port)
                await client.ws.close()
                await until(lambda: led.events.gone)
                assert 1 not in led.members.failover_endpoints

    asyncio.run(scene())
