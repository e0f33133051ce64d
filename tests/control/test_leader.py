"""A real leader and real members, over sockets of this machine: coming together, lies, silence."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time

import pytest

from phalanx.control import messages
from phalanx.control.endpoint import Endpoint
from phalanx.control.leader.liveness import Timing
from phalanx.control.member.member import Member
from phalanx.control.messages import Leaving, NoteMessage, Welcome
from phalanx.errors import JoinError
from tests.control.parties import (
    FAST,
    OTHER,
    TOKEN,
    MemberEars,
    actor,
    arrival,
    joined,
    leading,
    port_of,
    speaking,
    until,
)
from tests.kit.cli import Handle

ANOTHER = (
    f"another token than ours, which is from a test (fingerprint {TOKEN.fingerprint}): "
    "copy our token file there, or set PHALANX_TOKEN to the same value on both"
)

# -- coming together


def test_they_come_together_and_talk() -> None:
    async def meet() -> None:
        async with leading(3) as led, joined(led.port, 1) as (one, ears), joined(led.port, None) as (_, others):
            await led.leader.wait_for_members(5)
            assert set(led.members.roster.members) == {0, 1, 2}
            assert led.ears.gathered[-1] == (("host0", "host1", "hostNone"), ())
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
            await until(lambda: len(ears.told) == 2 and len(others.told) == 1 and len(led.ears.said) == 2)
            assert ears.told == [NoteMessage(text="to one"), NoteMessage(text="to all")]
            assert others.told == [NoteMessage(text="to all")]
            assert led.ears.said == [(1, NoteMessage(text="first")), (1, NoteMessage(text="second"))]
        assert led.ears.gone == ears.gone == others.gone == []

    asyncio.run(meet())


def test_one_alone_waits_for_nobody() -> None:
    async def meet() -> None:
        async with leading(1) as led:
            await led.leader.wait_for_members(0)

    asyncio.run(meet())


def test_clocks_are_compared() -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led, joined(led.port):
            await until(lambda: led.members.connected[1].round_trip < 5)
            assert abs(led.members.connected[1].skew) < 0.5

    asyncio.run(meet())


def test_who_is_missing_is_said() -> None:
    async def meet() -> None:
        async with leading(4) as led, joined(led.port, 2):
            with pytest.raises(JoinError) as missed:
                await led.leader.wait_for_members(0.3)
            assert missed.value.what == "nodes 1, 3 of 4 have not joined in 0 s"
            assert missed.value.details[0] == "joined: node 0 (host0), node 2 (host2)"
            assert "no connection attempts" in missed.value.details[2]

    asyncio.run(meet())


def test_who_knocked_is_rejected_is_said() -> None:
    async def meet() -> None:
        async with leading() as led:
            with pytest.raises(JoinError):
                async with joined(led.port, token=OTHER):
                    pass
            with pytest.raises(JoinError) as missed:
                await led.leader.wait_for_members(0.1)
            assert missed.value.details[2:] == (f"rejected: 127.0.0.1: {ANOTHER}",)
            assert missed.value.fix.startswith("see why it was rejected, and start it there again")

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("changes", "what", "noted"),
    [
        ({"run": "other"}, "leads another run", "it belongs to the run other, this is mine"),
        ({"member": 0}, "node 0 of this run is already there: host0, pid 100", "node 0 is taken by host0, pid 100"),
        ({"member": 5}, "would not start what", "it has node 5, node 0 has 2 nodes"),
        ({"terms": {"script": "b"}}, "would not start what", "it has script: b, node 0 has script: a"),
        ({"versions": {"torch": "1.0"}}, "has other versions than", "it has torch 1.0, node 0 has torch 2.9"),
        ({"slots": 4}, "has 4 workers, but 2 workers were expected", "it has 4 workers, but 2 workers were expected"),
        ({"trouble": "there is no GPU"}, "there is no GPU", "there is no GPU"),
        ({"terms": {"x": "y" * 300}}, "refuses this node", "Expected `str` of length <= 256"),
    ],
)
def test_refusals_in_words(changes: dict[str, object], what: str, noted: str) -> None:
    async def meet() -> None:
        own = arrival(0, run="mine", slots=1, terms={"script": "a"}, versions={"torch": "2.9"})
        async with leading(own=own, promised=(1, 2)) as led:
            began = time.monotonic()
            with pytest.raises(JoinError) as refused:
                async with joined(led.port, **{"member": 1, "slots": 2, **changes}):  # type: ignore[arg-type]
                    pass
            assert time.monotonic() - began < 2  # there is nothing to wait for
            assert what in refused.value.what
            assert [note for note in led.ears.notes if noted in note], led.ears.notes
            assert not led.ids

    asyncio.run(meet())


def test_a_leader_that_breaks_its_own_promise() -> None:
    async def meet() -> None:
        with pytest.raises(JoinError, match="it has 1 worker, but 4 workers were expected"):
            async with leading(promised=(4, 4)):
                pass

    asyncio.run(meet())


def test_who_cannot_take_part_says_so() -> None:
    async def meet() -> None:
        async with leading() as led:
            where = [Endpoint("127.0.0.1", led.port)]
            await Member(TOKEN, arrival(1, trouble="no GPU"), lambda: where, events=MemberEars()).decline()
            assert led.ears.notes == ["host1 at 127.0.0.1 was rejected: no GPU"]

    asyncio.run(meet())


def test_a_member_that_leaves_before_the_start_may_come_again() -> None:
    async def meet() -> None:
        async with leading(3) as led:
            for _ in range(2):
                async with joined(led.port, 1):
                    assert led.ids == {1}
                await until(lambda: not led.ids)
            assert led.ears.notes == ["node 1 (host1) left before the start"] * 2
            async with joined(led.port, 1) as (_, ears), joined(led.port, 2):
                await led.leader.wait_for_members(5)
                led.members.broadcast(messages.EndMessage(code=7))
                await led.leader.close()
                assert ears.told == [messages.EndMessage(code=7)]  # though at some time nobody was here
            assert led.ears.gone == []

    asyncio.run(meet())


def test_who_hears_that_one_leaves_finds_it_gone() -> None:
    async def meet() -> None:
        async with leading() as led:
            seen: list[set[int]] = []
            led.ears.message_received = lambda member, message: seen.append(led.ids)  # type: ignore[method-assign]
            async with joined(led.port):
                await led.leader.wait_for_members(5)
            await until(lambda: seen)
            assert seen == [set()]
            assert led.ears.gone == []

    asyncio.run(meet())


def test_a_warning_is_told_on_both_sides() -> None:
    async def meet() -> None:
        own = arrival(0, versions={"torch": "2.9"})
        async with leading(own=own) as led, joined(led.port, versions={"torch": "2.11"}) as (one, _):
            assert list(one.connection.welcome.notes) == led.ears.notes == ["host1 has torch 2.11, host0 2.9"]

    asyncio.run(meet())


def test_a_host_name_with_escapes_is_shown_and_not_sent() -> None:
    async def meet() -> None:
        own = arrival(0, versions={"torch": "2.9"})
        odd = {"host": "gpu\x1b]0;mine\x07\nphalanx: all is well", "versions": {"torch": "2.\x9b2J"}}
        async with leading(own=own) as led, joined(led.port, **odd):
            assert led.ears.notes == ["gpu\\x1b]0;mine\\x07\\nphalanx: all is well has torch 2.\\x9b2J, host0 2.9"]
            assert led.members.name(1).isprintable()

    asyncio.run(meet())


# -- who lies


def test_another_token() -> None:
    async def meet() -> None:
        async with leading() as led:
            with pytest.raises(JoinError) as refused:
                async with joined(led.port, token=OTHER):
                    pass
            assert "does not know this node's token" in refused.value.what
            told = "\n".join(refused.value.details)
            assert TOKEN.fingerprint in told
            assert OTHER.fingerprint in told
            assert led.ears.notes == [f"127.0.0.1 was rejected: {ANOTHER}"]

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"\xc1", "DecodeError"),
        (messages.encode(messages.Ping(time=1.0)), "ValidationError"),
        (b"\x82\xa2is\xa4note\xa4text\xa1\xff", "DecodeError"),  # no text
        (b"\x82\xa2is\xa4note\xa4zext" + b"\x81\xa1a" * 50_000, "DecodeError"),  # too deep
        (b"x" * (messages.FRAME_LIMIT + 1), "exceeds limit"),
        ("text", "it sent an invalid message"),
    ],
    ids=["garbage", "the leader's", "no text", "deep", "large", "a frame of text"],
)
def test_a_member_that_talks_nonsense_is_lost_alone(frame: bytes | str, why: str) -> None:
    async def meet() -> None:
        async with leading(3) as led, joined(led.port, 2) as (good, ears), speaking(led.port) as speaker:
            await speaker.enter(1)
            await led.leader.wait_for_members(5)
            with contextlib.suppress(ConnectionError):
                if isinstance(frame, str):
                    await speaker.ws.send_str(frame)
                else:
                    await speaker.ws.send_bytes(frame)
            await until(lambda: led.ears.gone)
            assert len(led.ears.gone) == 1
            assert led.ears.gone[0].startswith("1: ")
            assert why in led.ears.gone[0]
            good.send(NoteMessage(text="undisturbed"))
            await until(lambda: (2, NoteMessage(text="undisturbed")) in led.ears.said)
            assert ears.gone == []

    asyncio.run(meet())


def test_a_fault_of_those_who_listen_is_told() -> None:
    async def meet() -> None:
        async with leading() as led, joined(led.port) as (one, _):
            await led.leader.wait_for_members(5)

            def stumble(member: int, message: messages.FromMember) -> None:
                raise KeyError("seat")

            led.ears.message_received = stumble  # type: ignore[method-assign]
            one.send(NoteMessage(text="x"))
            await until(lambda: led.ears.gone)
            assert led.ears.gone == ["1: its message could not be processed (KeyError: 'seat')"]

    asyncio.run(meet())


# -- who falls silent


def test_a_member_that_stops_is_quiet_and_then_lost() -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led:
            with actor("member", str(led.port), "1") as one:
                await led.leader.wait_for_members(20)
                one.signal(signal.SIGSTOP)
                began = time.monotonic()
                await until(lambda: led.ears.notes)
                assert led.ears.notes == ["node 1 (host1) has not answered for 1 s"]
                assert led.ears.gone == []
                one.signal(signal.SIGCONT)
                await until(lambda: len(led.ears.notes) == 2)
                assert led.ears.notes[1] == "node 1 (host1) answers again"
                one.signal(signal.SIGSTOP)
                began = time.monotonic()
                await until(lambda: led.ears.gone)
                assert 1.3 < time.monotonic() - began < 5
                assert led.ears.gone == ["1: no message from it for 2 s (--node-timeout): link or machine is down"]
                assert not led.ids
                one.signal(signal.SIGCONT)
                await asyncio.to_thread(one.wait_for, "lost ")

    asyncio.run(meet())


def test_a_member_that_is_killed_is_lost_when_it_does_not_come_again() -> None:
    async def meet() -> None:
        async with leading() as led:
            with actor("member", str(led.port), "1") as one:
                await led.leader.wait_for_members(20)
                one.signal(signal.SIGKILL)
                await until(lambda: led.ears.gone)
                assert "its connection closed" in led.ears.gone[0]

    asyncio.run(meet())


def test_a_member_whose_port_is_closed_is_lost_at_once() -> None:
    async def meet(port: int) -> float:
        async with leading() as led, speaking(led.port) as speaker:
            words = messages.encode(arrival(1, failover_port=port))
            await speaker.ws.send_bytes(speaker.knock(words=words))
            await speaker.answered()
            await led.leader.wait_for_members(5)
            began = time.monotonic()
            await speaker.ws.close()
            await until(lambda: led.ears.gone)
            return time.monotonic() - began

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert asyncio.run(meet(port)) > Timing().resume - 0.5  # somebody is there, and could come again
    assert asyncio.run(meet(port)) < Timing().resume - 0.5


def test_a_member_that_is_silent_before_the_start_may_come_again() -> None:
    async def meet() -> None:
        async with leading(3, timing=FAST) as led, speaking(led.port) as speaker:
            await speaker.enter(1)
            await until(lambda: not led.ids)
            assert led.ears.notes[-1] == "node 1 (host1) left before the start"
            assert led.ears.gone == []
            async with joined(led.port, 1):
                assert led.ids == {1}

    asyncio.run(meet())


def test_a_leader_that_is_killed_is_missed_at_once(led: Handle) -> None:
    async def meet() -> None:
        async with joined(port_of(led)) as (_, ears):
            began = time.monotonic()
            led.signal(signal.SIGKILL)
            await until(lambda: ears.gone)
            assert time.monotonic() - began < 2
            assert "the connection to the leader closed" in ears.gone[0]

    asyncio.run(meet())


def test_a_leader_that_closes_is_missed_unless_it_said_so() -> None:
    async def meet(last: messages.Message | None) -> list[str]:
        async with leading() as led, joined(led.port) as (one, ears):
            await led.leader.wait_for_members(5)
            leaving = None
            if last is not None:
                led.members.broadcast(last)
                await until(lambda: ears.told)
                leaving = asyncio.create_task(one.leave())  # as whoever is told that all is over does
            began = time.monotonic()
            await led.leader.close()
            if leaving is not None:
                await leaving
            assert time.monotonic() - began < 2
            await until(lambda: ears.gone or ears.told)
        assert led.ears.gone == []
        return ears.gone

    assert len(asyncio.run(meet(None))) == 1
    assert asyncio.run(meet(messages.EndMessage(code=0))) == []


def test_a_leader_that_stops_is_missed_after_a_while() -> None:
    async def meet() -> None:
        with actor("leader", "2", "1.5") as job:
            async with joined(port_of(job)) as (one, ears):
                job.signal(signal.SIGSTOP)
                began = time.monotonic()
                await until(lambda: ears.gone)
                assert 1.3 < time.monotonic() - began < 5
                assert ears.notes[0].startswith("node 0 has not answered for 1 s")
                assert ears.gone == ["no message from it for 2 s (--node-timeout): link or machine is down"]
                began = time.monotonic()
                await one.leave()
                assert time.monotonic() - began < 4  # nobody says goodbye to us

    asyncio.run(meet())


def test_a_leader_that_was_stopped_does_not_blame_the_members() -> None:
    async def meet() -> None:
        with actor("leader", "2", "1.5") as job:
            port = port_of(job)
            async with speaking(port) as speaker:  # one that does not give up, unlike a Member
                await speaker.enter(1)
                await asyncio.to_thread(job.wait_for, "complete")
                job.signal(signal.SIGSTOP)
                await asyncio.sleep(2.5)
                job.signal(signal.SIGCONT)
                await speaker.send(NoteMessage(text="still here"))
                await asyncio.to_thread(job.wait_for, "heard 1 Note")
                assert "lost" not in job.out
                # Silent of its own it is lost as ever.
                await asyncio.to_thread(job.wait_for, "lost 1 no message")

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("members", "node_timeout", "rest", "quiet"),
    [(2, 15, 1, 3), (1000, 15, 1, 3), (4096, 15, 4.096, 7.5), (4096, 60, 4.096, 8.192), (100_000, 15, 5, 7.5)],
)
def test_thousands_are_asked_less_often(members: int, node_timeout: float, rest: float, quiet: float) -> None:
    timing = Timing(node_timeout=node_timeout)
    assert timing.rest(members) == pytest.approx(rest)
    assert timing.quiet(members) == pytest.approx(quiet)
    assert timing.rest(members) < timing.quiet(members) < timing.node_timeout


# -- where nobody is


@pytest.mark.parametrize("host", ["", "no such host", "fe80::1%lo", "[", "a" * 300, "127.0.0.1"])
def test_odd_places_are_obstacles_and_no_tracebacks(host: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = [Endpoint(host, sock.getsockname()[1])]

        async def meet() -> None:
            with pytest.raises(JoinError):
                await Member(TOKEN, arrival(1), lambda: where, events=MemberEars()).join(0.1)

        asyncio.run(meet())


def test_a_leader_that_comes_later_is_found() -> None:
    async def meet() -> None:
        where: list[Endpoint] = []
        ears = MemberEars()
        one = Member(TOKEN, arrival(1), lambda: where, events=ears)
        joining = asyncio.create_task(one.join(20))
        await until(lambda: ears.waits)
        async with leading() as led:
            where.append(Endpoint("127.0.0.1", led.port))
            assert (await joining).member == 1
            await one.leave(3, "enough")
            assert led.ears.said == [(1, Leaving(code=3, text="enough"))]

    asyncio.run(meet())


# -- nodes that come and go


def test_enough_begin_after_the_last_call_and_others_come_later() -> None:
    async def meet() -> None:
        timing = Timing(last_call=0.2)
        async with leading(3, least=2, timing=timing) as led, joined(led.port, None):
            await led.leader.wait_for_members(10)
            assert set(led.members.roster.members) == {0, 1}
            assert any("which is enough" in text for text in led.ears.waits)
            async with joined(led.port, None, failover_port=4711) as (late, _):
                await until(lambda: led.ears.came == [2])
                assert late.connection.welcome.member == 2
                roll = led.members.peer_list(0, working=[0, 1])
                assert [(peer.member, peer.port) for peer in roll.successors] == [(1, 0), (2, 4711)]
                assert (roll.working, roll.spares) == (((1, 1),), ((2, 2),))
                assert led.members.responsive == 3

    asyncio.run(meet())


def test_one_whose_place_is_taken_waits_until_it_is_free() -> None:
    async def meet() -> None:
        async with leading(2, least=1, timing=FAST) as led:
            async with joined(led.port, 1) as _:
                await led.leader.wait_for_members(10)
                ears = MemberEars()
                arrives = arrival(1, failover_port=4711)
                second = Member(TOKEN, arrives, lambda: [Endpoint("127.0.0.1", led.port)], events=ears)
                coming = asyncio.create_task(second.join(30))
                await until(lambda: any("node 1" in text for text in ears.waits))
            led.members.roster.remove(1)
            assert (await coming).member == 1
            await second.leave()

    asyncio.run(meet())


def test_whoever_takes_over_waits_for_those_it_knows_of() -> None:
    async def meet() -> None:
        async with leading(4, least=1, own=arrival(1)) as led:
            gathering = asyncio.create_task(led.leader.wait_for_survivors({2, 3}, 30))
            async with joined(led.port, 2), joined(led.port, 3):
                await gathering
                assert led.ids == {2, 3}
                assert led.ears.came == []
            await until(lambda: not led.ids)
        async with leading(4, least=1, own=arrival(1)) as led, joined(led.port, 3):
            await led.leader.wait_for_survivors({2, 3}, 0.3)  # and not for ever
            assert led.ids == {3}

    asyncio.run(meet())
