"""Members and leaders that become silent, die, or send invalid messages."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import time

import pytest

from phalanx.control import messages
from phalanx.control.leader.liveness import Timing
from phalanx.control.messages import NoteMessage
from tests.control.parties import FAST, actor, arrival, joined, leading, port_of, raw_client, until
from tests.kit.cli import Handle


def silence(who: str, gone: list[str]) -> int:
    """Return the seconds that are given as the only reason of the only loss."""
    (why,) = gone
    found = re.fullmatch(
        re.escape(who) + r"no message from it for (\d+) s \(--node-timeout\): link or machine is down", why
    )
    assert found, why
    return int(found[1])


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"\xc1", "DecodeError"),
        (messages.encode(messages.Ping(time=1.0)), "ValidationError"),
        (b"\x82\xa2is\xa4note\xa4text\xa1\xff", "DecodeError"),  # not valid text
        (b"\x82\xa2is\xa4note\xa4zext" + b"\x81\xa1a" * 50_000, "DecodeError"),  # nested too deeply
        (b"x" * (messages.FRAME_LIMIT + 1), "exceeds limit"),
        ("text", "it sent an invalid message"),
    ],
    ids=["garbage", "the leader's", "no text", "deep", "large", "a frame of text"],
)
def test_only_the_member_that_sends_an_invalid_message_is_lost(frame: bytes | str, why: str) -> None:
    async def meet() -> None:
        async with leading(3) as led, joined(led.port, 2) as (good, events), raw_client(led.port) as client:
            await client.enter(1)
            await led.leader.wait_for_members(60)
            with contextlib.suppress(ConnectionError):
                if isinstance(frame, str):
                    await client.ws.send_str(frame)
                else:
                    await client.ws.send_bytes(frame)
            await until(lambda: led.events.gone)
            assert len(led.events.gone) == 1
            assert led.events.gone[0].startswith("1: ")
            assert why in led.events.gone[0]
            good.send(NoteMessage(text="undisturbed"))
            await until(lambda: (2, NoteMessage(text="undisturbed")) in led.events.from_members)
            assert events.gone == []

    asyncio.run(meet())


def test_an_error_in_a_message_handler_is_reported() -> None:
    async def meet() -> None:
        async with leading() as led, joined(led.port) as (one, _):
            await led.leader.wait_for_members(60)

            def stumble(member: int, message: messages.FromMember) -> None:
                raise KeyError("seat")

            led.events.message_received = stumble  # type: ignore[method-assign]
            one.send(NoteMessage(text="x"))
            await until(lambda: led.events.gone)
            assert led.events.gone == ["1: its message could not be processed (KeyError: 'seat')"]

    asyncio.run(meet())


def test_a_stopped_member_is_reported_and_then_lost() -> None:
    async def meet() -> None:
        async with leading(timing=Timing(ping=0.1, node_timeout=4.0)) as led:
            with actor("member", str(led.port), "1") as one:
                await led.leader.wait_for_members(60)
                one.signal(signal.SIGSTOP)
                await until(lambda: led.events.notes)
                assert [note.partition(" for ")[0] for note in led.events.notes] == ["node 1 (host1) has not answered"]
                assert led.events.gone == []
                one.signal(signal.SIGCONT)
                await until(lambda: len(led.events.notes) == 2)
                assert led.events.notes[1] == "node 1 (host1) answers again"
                one.signal(signal.SIGSTOP)
                await until(lambda: led.events.gone)
                assert 4 <= silence("1: ", led.events.gone) < 20
                assert not led.ids
                one.signal(signal.SIGCONT)
                await asyncio.to_thread(one.wait_for, "lost ")

    asyncio.run(meet())


def test_a_killed_member_that_does_not_reconnect_is_lost() -> None:
    async def meet() -> None:
        async with leading() as led:
            with actor("member", str(led.port), "1") as one:
                await led.leader.wait_for_members(60)
                one.signal(signal.SIGKILL)
                await until(lambda: led.events.gone)
                assert "its connection closed" in led.events.gone[0]

    asyncio.run(meet())


def test_a_member_whose_port_is_closed_is_lost_at_once() -> None:
    async def meet(port: int) -> float:
        async with leading() as led, raw_client(led.port) as client:
            words = messages.encode(arrival(1, failover_port=port))
            await client.ws.send_bytes(client.join_request(words=words))
            await client.answered()
            await led.leader.wait_for_members(60)
            began = time.monotonic()
            await client.ws.close()
            await until(lambda: led.events.gone)
            return time.monotonic() - began

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        # something listens there, so the member may connect again
        assert asyncio.run(meet(port)) > Timing().resume - 0.5
    assert asyncio.run(meet(port)) < Timing().resume - 0.5


def test_a_member_that_is_silent_before_the_start_can_join_again() -> None:
    async def meet() -> None:
        async with leading(3, timing=FAST) as led, raw_client(led.port) as client:
            await client.enter(1)
            await until(lambda: not led.ids)
            assert led.events.notes[-1] == "node 1 (host1) left before the start"
            assert led.events.gone == []
            async with joined(led.port, 1):
                assert led.ids == {1}

    asyncio.run(meet())


def test_a_killed_leader_is_lost_at_once(led: Handle) -> None:
    async def meet() -> None:
        async with joined(port_of(led)) as (_, events):
            began = time.monotonic()
            led.signal(signal.SIGKILL)
            await until(lambda: events.gone)
            assert time.monotonic() - began < 12  # the node timeout is 15 s
            assert "the connection to the leader closed" in events.gone[0]

    asyncio.run(meet())


def test_a_leader_that_closes_is_lost_unless_it_ended_the_run() -> None:
    async def meet(last: messages.Message | None) -> list[str]:
        async with leading() as led, joined(led.port) as (one, events):
            await led.leader.wait_for_members(60)
            leaving = None
            if last is not None:
                led.members.broadcast(last)
                await until(lambda: events.from_leader)
                leaving = asyncio.create_task(one.leave())  # as a member does when the run ends
            began = time.monotonic()
            await led.leader.close()
            if leaving is not None:
                await leaving
            assert time.monotonic() - began < 12  # the node timeout is 15 s
            await until(lambda: events.gone or events.from_leader)
        assert led.events.gone == []
        return events.gone

    assert len(asyncio.run(meet(None))) == 1
    assert asyncio.run(meet(messages.EndMessage(code=0))) == []


def test_a_stopped_leader_is_lost_after_the_node_timeout() -> None:
    async def meet() -> None:
        with actor("leader", "2", "1.5") as job:
            async with joined(port_of(job)) as (one, events):
                job.signal(signal.SIGSTOP)
                await until(lambda: events.gone)
                assert events.notes[0].startswith("node 0 has not answered for ")
                assert 2 <= silence("", events.gone) < 20  # rounded
                began = time.monotonic()
                await one.leave()
                assert time.monotonic() - began < 15  # the leader does not answer

    asyncio.run(meet())


def test_a_leader_that_was_stopped_does_not_blame_the_members() -> None:
    async def meet() -> None:
        with actor("leader", "2", "4") as job:
            port = port_of(job)
            async with raw_client(port) as client:  # unlike a Member, a RawClient does not give up
                await client.enter(1)
                await asyncio.to_thread(job.wait_for, "complete")
                job.signal(signal.SIGSTOP)
                await asyncio.sleep(5)
                job.signal(signal.SIGCONT)
                await client.send(NoteMessage(text="still here"))
                # A silent member still counts as lost, but only after it was received.
                await asyncio.to_thread(job.wait_for, "lost 1 no message")
                assert "received 1 Note" in job.out.partition("lost")[0]

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("members", "node_timeout", "rest", "quiet"),
    [(2, 15, 1, 3), (1000, 15, 1, 3), (4096, 15, 4.096, 7.5), (4096, 60, 4.096, 8.192), (100_000, 15, 5, 7.5)],
)
def test_pings_are_less_frequent_with_thousands_of_members(
    members: int, node_timeout: float, rest: float, quiet: float
) -> None:
    timing = Timing(node_timeout=node_timeout)
    assert timing.rest(members) == pytest.approx(rest)
    assert timing.quiet(members) == pytest.approx(quiet)
    assert timing.rest(members) < timing.quiet(members) < timing.node_timeout
