"""A real leader, real members and all kinds of strangers, over sockets of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from phalanx.control import channel, door, messages
from phalanx.control.channel import Nonces
from phalanx.control.leader import PATH, Timing
from phalanx.control.member import Endpoint, Member
from phalanx.control.messages import Answer, Challenge, Knock, Leaving, Note, Refusal, Welcome
from phalanx.errors import JoinError
from tests.control.parties import (
    FAST,
    OTHER,
    TOKEN,
    Led,
    MemberEars,
    actor,
    arrival,
    joined,
    leading,
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
            await led.leader.roll_call(5)
            assert set(led.leader.roster.members) == {0, 1, 2}
            assert one.welcome == Welcome(member=1, run="test", leader="host0", lost_after=15.0)
            assert (one.leader_address, one.own_address) == ("127.0.0.1", "127.0.0.1")
            assert {(guest.address, guest.reached) for guest in led.leader.guests.values()} == {("127.0.0.1",) * 2}
            led.leader.send(1, Note(text="to one"))
            led.leader.broadcast(Note(text="to all"))
            one.send(Note(text="first"))
            one.send(Note(text="second"))
            await until(lambda: len(ears.told) == 2 and len(others.told) == 1 and len(led.ears.said) == 2)
            assert ears.told == [Note(text="to one"), Note(text="to all")]
            assert others.told == [Note(text="to all")]
            assert led.ears.said == [(1, Note(text="first")), (1, Note(text="second"))]
        assert led.ears.gone == ears.gone == others.gone == []

    asyncio.run(meet())


def test_one_alone_waits_for_nobody() -> None:
    async def meet() -> None:
        async with leading(1) as led:
            await led.leader.roll_call(0)

    asyncio.run(meet())


def test_clocks_are_compared() -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led, joined(led.port):
            await until(lambda: led.leader.guests[1].trip < 5)
            assert abs(led.leader.guests[1].skew) < 0.5

    asyncio.run(meet())


def test_who_is_missing_is_said() -> None:
    async def meet() -> None:
        async with leading(4) as led, joined(led.port, 2):
            with pytest.raises(JoinError) as missed:
                await led.leader.roll_call(0.3)
            assert missed.value.what == "nodes 1, 3 of 4 have not joined in 0 s"
            assert missed.value.details[0] == "here: node 0 (host0), node 2 (host2)"
            assert "nobody else has knocked" in missed.value.details[2]

    asyncio.run(meet())


def test_who_knocked_in_vain_is_said() -> None:
    async def meet() -> None:
        async with leading() as led:
            with pytest.raises(JoinError):
                async with joined(led.port, token=OTHER):
                    pass
            with pytest.raises(JoinError) as missed:
                await led.leader.roll_call(0.1)
            assert missed.value.details[2:] == (f"127.0.0.1 knocked in vain: {ANOTHER}",)

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("changes", "what", "noted"),
    [
        ({"run": "other"}, "leads another run", "it belongs to the run other, this is mine"),
        ({"member": 0}, "node 0 of this run is already there: host0, pid 100", "node 0 is taken by host0, pid 100"),
        ({"member": 5}, "would not start what", "it has node 5, node 0 has 2 nodes"),
        ({"terms": {"script": "b"}}, "would not start what", "it has script: b, node 0 has script: a"),
        ({"versions": {"torch": "1.0"}}, "has other versions than", "it has torch 1.0, node 0 has torch 2.9"),
        ({"slots": 4}, "takes 4 workers, and was to take 2 workers", "it takes 4 workers, and was to take 2 workers"),
        ({"trouble": "there is no GPU"}, "there is no GPU", "there is no GPU"),
        ({"terms": {"x": "y" * 300}}, "does not let this node in", "Expected `str` of length <= 256"),
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
        with pytest.raises(JoinError, match="it takes 1 worker, and was to take 4 workers"):
            async with leading(promised=(4, 4)):
                pass

    asyncio.run(meet())


def test_who_cannot_take_part_says_so() -> None:
    async def meet() -> None:
        async with leading() as led:
            where = [Endpoint("127.0.0.1", led.port)]
            await Member(TOKEN, arrival(1, trouble="no GPU"), lambda: where, ears=MemberEars()).excuse()
            assert led.ears.notes == ["host1 at 127.0.0.1 was not let in: no GPU"]

    asyncio.run(meet())


def test_a_member_that_leaves_before_the_start_may_come_again() -> None:
    async def meet() -> None:
        async with leading(3) as led:
            for _ in range(2):
                async with joined(led.port, 1):
                    assert led.ids == {1}
                await until(lambda: not led.ids)
            assert led.ears.notes == ["node 1 (host1) has left before the start"] * 2
            async with joined(led.port, 1) as (_, ears), joined(led.port, 2):
                await led.leader.roll_call(5)
                led.leader.broadcast(messages.End(code=7))
                await led.leader.close()
                assert ears.told == [messages.End(code=7)]  # though at some time nobody was here
            assert led.ears.gone == []

    asyncio.run(meet())


def test_who_hears_that_one_leaves_finds_it_gone() -> None:
    async def meet() -> None:
        async with leading() as led:
            seen: list[set[int]] = []
            led.ears.heard = lambda member, message: seen.append(led.ids)  # type: ignore[method-assign]
            async with joined(led.port):
                await led.leader.roll_call(5)
            await until(lambda: seen)
            assert seen == [set()]
            assert led.ears.gone == []

    asyncio.run(meet())


def test_a_warning_is_told_on_both_sides() -> None:
    async def meet() -> None:
        own = arrival(0, versions={"torch": "2.9"})
        async with leading(own=own) as led, joined(led.port, versions={"torch": "2.11"}) as (one, _):
            assert one.welcome is not None
            assert list(one.welcome.notes) == led.ears.notes == ["host1 has torch 2.11, host0 2.9"]

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
            assert led.ears.notes == [f"127.0.0.1 was not let in: {ANOTHER}"]

    asyncio.run(meet())


def test_a_recorded_knock_opens_nothing() -> None:
    async def meet() -> None:
        async with leading(3) as led:
            async with speaking(led.port) as first:
                await first.challenged()
                recorded = first.knock()
                await first.ws.send_bytes(recorded)
                assert isinstance(await first.answered(), Welcome)
            await until(lambda: not led.ids)
            async with speaking(led.port) as second:
                await second.challenged()
                assert second.nonce != first.nonce
                await second.ws.send_bytes(recorded)
                answer = await second.answered()
                assert isinstance(answer, Refusal)
                assert answer.kind == "token"
                await second.closed()
            assert not led.ids

    asyncio.run(meet())


@contextlib.asynccontextmanager
async def impostor(proof: bytes | None) -> AsyncIterator[int]:
    """A leader without the token, which lets everybody in. Without a proof it gives back the member's own."""

    async def visit(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        await ws.send_bytes(messages.encode(Challenge(protocol=messages.PROTOCOL, nonce=b"n" * 32)))
        knock = messages.door.decode(await ws.receive_bytes())
        assert isinstance(knock, Knock)
        content = messages.encode(Welcome(member=1, run="evil", leader="evil", lost_after=15.0))
        await ws.send_bytes(messages.encode(Answer(content=content, proof=knock.proof if proof is None else proof)))
        await ws.close()
        return ws

    app = web.Application()
    app.router.add_get(PATH, visit)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "proof",
    [None, b"", b"x" * 32, channel.prove(OTHER.key, channel.LEADER, Nonces(b"n" * 32, b"n" * 32), b"")],
    ids=["reflected", "none", "guessed", "of another token"],
)
def test_a_foreign_leader_is_not_followed(proof: bytes | None) -> None:
    async def meet() -> None:
        async with impostor(proof) as port:
            with pytest.raises(JoinError, match="token"):
                async with joined(port):
                    pass

    asyncio.run(meet())


def changed(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[1][:-1] + bytes([frames[1][-1] ^ 1])]


TAMPERED = {
    "changed": changed,
    "repeated": lambda frames: [frames[0], frames[0]],
    "left out": lambda frames: [frames[0], frames[2]],
    "out of turn": lambda frames: [frames[0], frames[2], frames[1]],
    "without a code": lambda frames: [frames[0], messages.encode(Note(text="trust me"))],
    "empty": lambda frames: [frames[0], b""],
}


@pytest.mark.parametrize("way", TAMPERED)
def test_a_frame_that_is_not_the_next_ends_the_connection(way: str) -> None:
    async def meet() -> None:
        async with leading(3) as led, joined(led.port, 2) as (good, _), speaking(led.port) as speaker:
            await speaker.enter(1)
            await led.leader.roll_call(5)
            frames = [speaker.seal(messages.encode(Note(text=str(number)))) for number in range(3)]
            for frame in TAMPERED[way](frames):
                await speaker.ws.send_bytes(frame)
            await speaker.closed()
            await until(lambda: led.ears.gone)
            assert led.ears.gone == ["1: it sent what is not a message of phalanx (ForgedFrameError)"]
            assert led.ears.said == [(1, Note(text="0"))]
            good.send(Note(text="undisturbed"))
            await until(lambda: (2, Note(text="undisturbed")) in led.ears.said)

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"\xc1", "DecodeError"),
        (messages.encode(messages.Ping(time=1.0)), "ValidationError"),
        (b"\x82\xa2is\xa4note\xa4text\xa1\xff", "DecodeError"),  # no text
        (b"\x82\xa2is\xa4note\xa4zext" + b"\x81\xa1a" * 50_000, "DecodeError"),  # too deep
        (b"x" * messages.FRAME_LIMIT, "exceeds limit"),
        ("text", "it sent what is not a message"),
    ],
    ids=["garbage", "the leader's", "no text", "deep", "large", "a frame of text"],
)
def test_a_member_that_talks_nonsense_is_lost_alone(frame: bytes | str, why: str) -> None:
    async def meet() -> None:
        async with leading(3) as led, joined(led.port, 2) as (good, ears), speaking(led.port) as speaker:
            await speaker.enter(1)
            await led.leader.roll_call(5)
            with contextlib.suppress(ConnectionError):
                if isinstance(frame, str):
                    await speaker.ws.send_str(frame)
                else:
                    await speaker.ws.send_bytes(speaker.seal(frame))
            await until(lambda: led.ears.gone)
            assert len(led.ears.gone) == 1
            assert led.ears.gone[0].startswith("1: ")
            assert why in led.ears.gone[0]
            good.send(Note(text="undisturbed"))
            await until(lambda: (2, Note(text="undisturbed")) in led.ears.said)
            assert ears.gone == []

    asyncio.run(meet())


def test_a_fault_of_those_who_listen_is_told() -> None:
    async def meet() -> None:
        async with leading() as led, joined(led.port) as (one, _):
            await led.leader.roll_call(5)

            def stumble(member: int, message: messages.FromMember) -> None:
                raise KeyError("seat")

            led.ears.heard = stumble  # type: ignore[method-assign]
            one.send(Note(text="x"))
            await until(lambda: led.ears.gone)
            assert led.ears.gone == ["1: what it said could not be followed (KeyError: 'seat')"]

    asyncio.run(meet())


# -- strangers


async def conversation(port: int, *parts: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """What is answered to these parts until the leader hangs up, and after how long it does."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            while data := await reader.read(65536):
                answer += data
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer, time.monotonic() - began


REQUEST = (
    f"GET {PATH} HTTP/1.1\r\nHost: phalanx\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()


@pytest.mark.parametrize(
    ("words", "answered"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"HTTP/1.1 404 "),
        (b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"HTTP/1.1 404 "),
        (b"GET " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"HTTP/1.1 400 "),
    ],
)
def test_a_wrong_path_is_answered_by_phalanx(words: bytes, answered: bytes) -> None:
    async def meet() -> bytes:
        async with leading() as led:
            return (await conversation(led.port, words))[0]

    answer = asyncio.run(meet())
    assert answer.startswith(answered)
    assert b"\r\nServer: phalanx\r\n" in answer


STRANGERS = {
    "silence": (),
    "garbage": (bytes(range(256)) * 4,),
    "half a request": (REQUEST[:40],),
    "no knock": (REQUEST,),
    "half a frame": (REQUEST, b"\x82\xfe\xff"),
    "a long header": (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000,),
    "an unmasked frame of text": (REQUEST, b"\x81\x05hello"),
    "pings": (REQUEST, *[b"\x89\x80abcd"] * 20),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_turned_away(kind: str) -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led:
            _, seconds = await conversation(led.port, *STRANGERS[kind])
            assert seconds < 3 * FAST.patience
            async with joined(led.port):
                await led.leader.roll_call(5)
            assert led.ears.gone == []

    asyncio.run(meet())


@pytest.mark.parametrize("words", [REQUEST, REQUEST + b"\x82\xfe\x01\x00" + bytes(400)], ids=["request", "frame"])
def test_a_slow_stranger_is_turned_away(words: bytes) -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led:
            parts = [words[place : place + 1] for place in range(len(words))]
            if len(words) > len(REQUEST):
                parts = [REQUEST, *parts[len(REQUEST) :]]
            _, seconds = await conversation(led.port, *parts[:40], pause=0.05)
            assert FAST.patience < seconds < 2.5

    asyncio.run(meet())


def test_a_member_outstays_the_patience_with_strangers() -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led, joined(led.port) as (one, ears):
            await led.leader.roll_call(5)
            await asyncio.sleep(3 * FAST.patience)
            one.send(Note(text="x" * 60_000))
            one.send(Note(text="y" * 60_000))  # more than a stranger may say
            await until(lambda: len(led.ears.said) == 2)
            assert led.ears.gone == ears.gone == []

    asyncio.run(meet())


def mutated(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[place] = chance.randrange(256)
            case 1:
                del changed[place:]
            case 2:
                changed[place:place] = chance.randbytes(chance.randrange(1, 40))
            case _:
                changed[place] ^= 1 << chance.randrange(8)
        if not changed:
            return b""
    return bytes(changed)


def test_mutated_handshakes_leave_no_trace() -> None:
    chance = random.Random(20)  # the same on every machine

    async def knock(led: Led) -> None:
        async with speaking(led.port) as speaker:
            await speaker.challenged()
            content = mutated(speaker.knock(), chance)
            if chance.randrange(2):
                await speaker.ws.send_bytes(content)
            else:  # a lie of somebody with the token
                await speaker.ws.send_bytes(speaker.knock(words=mutated(messages.encode(arrival(1)), chance)))
            await speaker.ws.receive(5)

    async def call(led: Led) -> None:
        await conversation(led.port, mutated(REQUEST, chance) + chance.randbytes(chance.randrange(60)))

    async def meet() -> None:
        # Of so many that liars cannot make it complete.
        async with leading(1000, timing=FAST) as led:
            for _ in range(8):
                async with asyncio.timeout(15):
                    await asyncio.gather(*(knock(led) for _ in range(20)), *(call(led) for _ in range(20)))
            await until(lambda: not led.ids)
            async with joined(led.port, 999):
                assert led.ids == {999}

    asyncio.run(meet())


# -- a leader in a process of its own


@pytest.fixture
def led() -> Iterator[Handle]:
    with actor("leader", "2", "15") as job:
        yield job
        assert job.err == ""


def port_of(job: Handle) -> int:
    ready = re.compile(r"port (\d+) files \d+\n")
    job.wait_for(ready)
    return int(ready.findall(job.out)[0])


def resident(pid: int, name: str = "VmRSS") -> int:
    return next(
        int(line.split()[1]) * 1024
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )


LARGE = 100 << 20
FLOODS = {
    "a frame": REQUEST + b"\x82\xff" + struct.pack(">Q", LARGE) + b"mask",
    "frames": REQUEST,
    "a body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGE,
    "a body in chunks": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n6400000\r\n",
    "a header": b"GET / HTTP/1.1\r\nX: ",
}


def test_floods_find_no_room(led: Handle) -> None:
    port = port_of(led)

    async def pour(start: bytes, block: bytes) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = 0
        with contextlib.suppress(ConnectionError):
            writer.write(start)
            while sent < LARGE:
                writer.write(block)
                await writer.drain()
                sent += len(block)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        del reader
        return sent

    async def meet() -> None:
        async with joined(port):
            await asyncio.to_thread(led.wait_for, "complete")
            before = resident(led.pid)
            for kind, start in FLOODS.items():
                # A frame that is not the last of its message, over and over.
                block = (b"\x02\xfe\xff\xff" + b"mask" + b"x" * 65535) if kind == "frames" else b"x" * 65536
                sent = await asyncio.wait_for(asyncio.gather(*(pour(start, block) for _ in range(4))), 30)
                assert max(sent) < LARGE / 4, kind
            assert resident(led.pid, "VmHWM") - before < 6 << 20
            assert "lost" not in led.out

    asyncio.run(meet())


def test_a_crowd_of_strangers_keeps_no_member_out(led: Handle) -> None:
    port = port_of(led)
    assert f"port {port} files 1024" in led.out

    def files() -> int:
        return len(os.listdir(f"/proc/{led.pid}/fd"))

    async def meet() -> None:
        with actor("strangers", str(port), "2000") as crowd:
            await asyncio.to_thread(crowd.wait_for, "called")
            assert files() <= door.MOST + 4 * door.AT_ONCE
            began = time.monotonic()
            async with joined(port) as (_, ears):
                assert time.monotonic() - began < 2
                with actor("strangers", str(port), "2000") as more:
                    await asyncio.to_thread(more.wait_for, "called")
                    assert files() <= door.MOST + 4 * door.AT_ONCE
                assert ears.gone == []

    asyncio.run(meet())
    led.wait_for("heard 1 Leaving")
    assert "lost" not in led.out
    assert led.err == ""


def test_whoever_floods_the_door_closes_it_for_himself() -> None:
    async def meet() -> None:
        async with leading(timing=Timing(patience=5)) as led:
            early = await asyncio.open_connection("127.0.0.1", led.port)
            crowd = []
            for _ in range(door.MOST + 100):
                crowd.append(await asyncio.open_connection("127.0.0.1", led.port, local_addr=("127.0.0.3", 0)))
            assert await asyncio.wait_for(crowd[0][0].read(), 5) == b""  # the oldest of them has gone
            assert not early[0].at_eof()
            early[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await asyncio.wait_for(early[0].readline(), 5)).startswith(b"HTTP/1.1 404")
            for _, writer in (early, *crowd):
                writer.transport.abort()

    asyncio.run(meet())


def test_files_for_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for limits, members, wanted in [
        ((1024, 1 << 20), 2, []),
        ((1024, 1 << 20), 4096, [(4096 + door.MOST + 3 * door.AT_ONCE + 256, 1 << 20)]),
        ((1024, 4500), 4096, [(4500, 4500)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4096, []),
    ]:
        asked.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        door.make_room(members)
        assert asked == wanted
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(JoinError, match="4096 nodes cannot join: this process may have 4096 files open"):
        door.make_room(4096)


# -- who falls silent


def test_a_member_that_stops_is_quiet_and_then_lost() -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led:
            with actor("member", str(led.port), "1") as one:
                await led.leader.roll_call(20)
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
                assert led.ears.gone == ["1: not a word from it in 2 s (--lost-after): link or machine is down"]
                assert not led.ids
                one.signal(signal.SIGCONT)
                await asyncio.to_thread(one.wait_for, "lost ")

    asyncio.run(meet())


def test_a_member_that_is_killed_is_lost_at_once() -> None:
    async def meet() -> None:
        async with leading() as led:
            with actor("member", str(led.port), "1") as one:
                await led.leader.roll_call(20)
                began = time.monotonic()
                one.signal(signal.SIGKILL)
                await until(lambda: led.ears.gone)
                assert time.monotonic() - began < 2
                assert "its connection closed" in led.ears.gone[0]

    asyncio.run(meet())


def test_a_member_that_is_silent_before_the_start_may_come_again() -> None:
    async def meet() -> None:
        async with leading(3, timing=FAST) as led, speaking(led.port) as speaker:
            await speaker.enter(1)
            await until(lambda: not led.ids)
            assert led.ears.notes[-1] == "node 1 (host1) has left before the start"
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
            await led.leader.roll_call(5)
            leaving = None
            if last is not None:
                led.leader.broadcast(last)
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
    assert asyncio.run(meet(messages.End(code=0))) == []


def test_a_leader_that_stops_is_missed_after_a_while() -> None:
    async def meet() -> None:
        with actor("leader", "2", "1.5") as job:
            async with joined(port_of(job)) as (one, ears):
                job.signal(signal.SIGSTOP)
                began = time.monotonic()
                await until(lambda: ears.gone)
                assert 1.3 < time.monotonic() - began < 5
                assert ears.notes[0].startswith("node 0 has not answered for 1 s")
                assert ears.gone == ["not a word from it in 2 s (--lost-after): link or machine is down"]
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
                await speaker.send(Note(text="still here"))
                await asyncio.to_thread(job.wait_for, "heard 1 Note")
                assert "lost" not in job.out
                # Silent of its own it is lost as ever.
                await asyncio.to_thread(job.wait_for, "lost 1 not a word")

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("members", "lost_after", "rest", "quiet"),
    [(2, 15, 1, 3), (1000, 15, 1, 3), (4096, 15, 4.096, 7.5), (4096, 60, 4.096, 8.192), (100_000, 15, 5, 7.5)],
)
def test_thousands_are_asked_less_often(members: int, lost_after: float, rest: float, quiet: float) -> None:
    timing = Timing(lost_after=lost_after)
    assert timing.rest(members) == pytest.approx(rest)
    assert timing.quiet(members) == pytest.approx(quiet)
    assert timing.rest(members) < timing.quiet(members) < timing.lost_after


# -- where nobody is


@pytest.mark.parametrize("host", ["", "no such host", "fe80::1%lo", "[", "a" * 300, "127.0.0.1"])
def test_odd_places_are_obstacles_and_no_tracebacks(host: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = [Endpoint(host, sock.getsockname()[1])]

        async def meet() -> None:
            with pytest.raises(JoinError):
                await Member(TOKEN, arrival(1), lambda: where, ears=MemberEars()).join(0.1)

        asyncio.run(meet())


def test_a_leader_that_comes_later_is_found() -> None:
    async def meet() -> None:
        where: list[Endpoint] = []
        ears = MemberEars()
        one = Member(TOKEN, arrival(1), lambda: where, ears=ears)
        joining = asyncio.create_task(one.join(20))
        await until(lambda: ears.waits)
        async with leading() as led:
            where.append(Endpoint("127.0.0.1", led.port))
            assert (await joining).member == 1
            await one.leave(3, "enough")
            assert led.ears.said == [(1, Leaving(code=3, text="enough"))]

    asyncio.run(meet())
