"""A real leader and real members join, exchange messages, leave and join again, over local sockets."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.control import messages
from phalanx.control.endpoint import Endpoint
from phalanx.control.leader.liveness import Timing
from phalanx.control.member.member import Member
from phalanx.control.messages import Leaving, NoteMessage, Welcome
from phalanx.errors import JoinError
from tests.control.parties import FAST, TOKEN, MemberEvents, arrival, joined, leading, until


def test_members_join_and_exchange_messages() -> None:
    async def meet() -> None:
        async with leading(3) as led, joined(led.port, 1) as (one, events), joined(led.port, None) as (_, others):
            await led.leader.wait_for_members(60)
            assert set(led.members.roster.members) == {0, 1, 2}
            assert led.events.gathered[-1] == (("host0", "host1", "hostNone"), ())
            session = led.members.connected[1].session
            expected = Welcome(member=1, run="test", leader="host0", node_timeout=15.0, session=session)
            assert one.connection.welcome == expected
            assert (one.connection.leader_address, one.connection.own_address) == ("127.0.0.1", "127.0.0.1")
            assert {(each.address, each.leader_address) for each in led.members.connected.values()} == {
                ("127.0.0.1",) * 2
            }
            led.members.send(1, NoteMessage(text="to one"))
            led.members.broadcast(NoteMessage(text="to all"))
            one.send(NoteMessage(text="first"))
            one.send(NoteMessage(text="second"))
            await until(
                lambda: (
                    len(events.from_leader) == 2 and len(others.from_leader) == 1 and len(led.events.from_members) == 2
                )
            )
            assert events.from_leader == [NoteMessage(text="to one"), NoteMessage(text="to all")]
            assert others.from_leader == [NoteMessage(text="to all")]
            assert led.events.from_members == [(1, NoteMessage(text="first")), (1, NoteMessage(text="second"))]
        assert led.events.gone == events.gone == others.gone == []

    asyncio.run(meet())


def test_a_single_node_does_not_wait() -> None:
    async def meet() -> None:
        async with leading(1) as led:
            await led.leader.wait_for_members(0)

    asyncio.run(meet())


def test_clocks_are_compared() -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led, joined(led.port):
            await until(lambda: led.members.connected[1].clock.round_trip < 5)
            assert abs(led.members.connected[1].clock.skew) < 0.5

    asyncio.run(meet())


def test_missing_nodes_are_named() -> None:
    async def meet() -> None:
        async with leading(4) as led, joined(led.port, 2):
            with pytest.raises(JoinError) as missed:
                await led.leader.wait_for_members(0.3)
            assert missed.value.what == "nodes 1, 3 of 4 have not joined in 0 s"
            assert missed.value.details[0] == "joined: node 0 (host0), node 2 (host2)"
            assert "no connection attempts" in missed.value.details[2]

    asyncio.run(meet())


def test_a_member_that_leaves_before_the_start_can_join_again() -> None:
    async def meet() -> None:
        async with leading(3) as led:
            for _ in range(2):
                async with joined(led.port, 1):
                    assert led.ids == {1}
                await until(lambda: not led.ids)
            assert led.events.notes == ["node 1 (host1) left before the start"] * 2
            async with joined(led.port, 1) as (_, events), joined(led.port, 2):
                await led.leader.wait_for_members(60)
                led.members.broadcast(messages.EndMessage(code=7))
                await led.leader.close()
                assert events.from_leader == [
                    messages.EndMessage(code=7)
                ]  # although no member was connected for a while
            assert led.events.gone == []

    asyncio.run(meet())


def test_a_member_is_removed_before_its_leaving_is_reported() -> None:
    async def meet() -> None:
        async with leading() as led:
            seen: list[set[int]] = []
            led.events.message_received = lambda member, message: seen.append(led.ids)  # type: ignore[method-assign]
            async with joined(led.port):
                await led.leader.wait_for_members(60)
            await until(lambda: seen)
            assert seen == [set()]
            assert led.events.gone == []

    asyncio.run(meet())


def test_a_leader_that_starts_later_is_found() -> None:
    async def meet() -> None:
        where: list[Endpoint] = []
        events = MemberEvents()
        one = Member(TOKEN, arrival(1), lambda: where, events=events)
        joining = asyncio.create_task(one.join(20))
        await until(lambda: events.waits)
        async with leading() as led:
            where.append(Endpoint("127.0.0.1", led.port))
            assert (await joining).member == 1
            await one.leave(3, "enough")
            assert led.events.from_members == [(1, Leaving(code=3, text="enough"))]

    asyncio.run(meet())


def test_the_minimum_starts_after_the_last_call_and_others_join_later() -> None:
    async def meet() -> None:
        timing = Timing(last_call=0.2)
        async with leading(3, least=2, timing=timing) as led, joined(led.port, None):
            await led.leader.wait_for_members(60)
            assert set(led.members.roster.members) == {0, 1}
            assert any("which is enough" in text for text in led.events.waits)
            async with joined(led.port, None, failover_port=4711) as (late, _):
                await until(lambda: led.events.came == [2])
                assert late.connection.welcome.member == 2
                roll = led.members.peer_list(0, working=[0, 1])
                assert [(peer.member, peer.port) for peer in roll.successors] == [(1, 0), (2, 4711)]
                assert (roll.working, roll.spares) == (((1, 1),), ((2, 2),))
                assert led.members.responsive == 3

    asyncio.run(meet())


def test_a_node_whose_number_is_taken_waits_until_it_is_free() -> None:
    async def meet() -> None:
        async with leading(2, least=1, timing=FAST) as led:
            async with joined(led.port, 1) as _:
                await led.leader.wait_for_members(60)
                events = MemberEvents()
                arrives = arrival(1, failover_port=4711)
                second = Member(TOKEN, arrives, lambda: [Endpoint("127.0.0.1", led.port)], events=events)
                coming = asyncio.create_task(second.join(30))
                await until(lambda: any("node 1" in text for text in events.waits))
            led.members.roster.remove(1)
            assert (await coming).member == 1
            await second.leave()

    asyncio.run(meet())


def test_a_new_leader_waits_for_the_survivors_it_knows() -> None:
    async def meet() -> None:
        async with leading(4, least=1, own=arrival(1)) as led:
            gathering = asyncio.create_task(led.leader.wait_for_survivors({2, 3}, 30))
            async with joined(led.port, 2), joined(led.port, 3):
                await gathering
                assert led.ids == {2, 3}
                assert led.events.came == []
            await until(lambda: not led.ids)
        async with leading(4, least=1, own=arrival(1)) as led, joined(led.port, 3):
            await led.leader.wait_for_survivors({2, 3}, 0.3)  # it does not wait forever
            assert led.ids == {3}

    asyncio.run(meet())
