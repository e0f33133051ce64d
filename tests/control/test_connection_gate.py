"""Unknown clients at a real leader: garbage, floods, thousands of connections. Members can still join."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import ssl
import struct
import time
from pathlib import Path

import aiohttp
import pytest

from phalanx.control import messages
from phalanx.control.leader import server
from phalanx.control.leader.liveness import Timing
from phalanx.control.leader.server import PATH
from phalanx.control.messages import NoteMessage
from phalanx.errors import JoinError
from tests.control.parties import (
    FAST,
    RunningLeader,
    actor,
    arrival,
    joined,
    leading,
    port_of,
    raw_client,
    until,
)
from tests.fuzz.mutation import mutated
from tests.kit.cli import Handle
from tests.kit.proc import SLOWEST


async def conversation(port: int, *parts: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """Send the parts. Return the answer until the leader closes the connection, and how long that takes."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
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
        (b"GET " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"HTTP/1.1 404 "),
        # What a page in a browser sends, from any site.
        (REQUEST.replace(b"Host:", b"Origin: http://127.0.0.1:29500\r\nHost:"), b"HTTP/1.1 403 "),
        (REQUEST.replace(b"Host:", b"origin: null\r\nHost:"), b"HTTP/1.1 403 "),
    ],
)
def test_a_wrong_path_is_answered_by_phalanx(words: bytes, answered: bytes) -> None:
    async def meet() -> bytes:
        async with leading() as led:
            return (await conversation(led.port, words))[0]

    answer = asyncio.run(meet())
    assert answer.startswith(answered)
    assert b"\r\nServer: phalanx\r\n" in answer


def client_hello() -> bytes:
    """Return the first bytes of a TLS connection."""
    out = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


HELLO = client_hello()

UNKNOWN_CLIENTS = {
    "silence": (),
    "garbage": (bytes(range(256)) * 4,),
    "half a request": (REQUEST[:40],),
    "no join request": (REQUEST,),
    "half a frame": (REQUEST, b"\x82\xfe\xff"),
    "a long header": (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000,),
    "an unmasked frame of text": (REQUEST, b"\x81\x05hello"),
    "half a handshake": (HELLO[:100],),
    "a broken handshake": (b"\x16\x03\x01" + bytes(range(256)) * 4,),
    "a handshake, then garbage": (HELLO, bytes(range(256)) * 4),
    "pings": (REQUEST, *[b"\x89\x80abcd"] * 20),
}


@pytest.mark.parametrize("kind", UNKNOWN_CLIENTS)
def test_unknown_clients_are_disconnected(kind: str) -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led:
            _, seconds = await conversation(led.port, *UNKNOWN_CLIENTS[kind])
            assert seconds < 3 * FAST.patience * SLOWEST
            async with joined(led.port):
                await led.leader.wait_for_members(60)
            assert led.events.gone == []

    asyncio.run(meet())


@pytest.mark.parametrize("words", [REQUEST, HELLO], ids=["request", "handshake"])
def test_a_slow_unknown_client_is_disconnected(words: bytes) -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led:
            parts = [words[place : place + 1] for place in range(len(words))]
            _, seconds = await conversation(led.port, *parts[:40], pause=0.05)
            assert FAST.patience < seconds < 2.5 * SLOWEST

    asyncio.run(meet())


def test_the_time_limit_of_unknown_clients_does_not_apply_to_members() -> None:
    async def meet() -> None:
        async with leading(timing=FAST) as led, joined(led.port) as (one, events):
            await led.leader.wait_for_members(60)
            await asyncio.sleep(3 * FAST.patience)
            one.send(NoteMessage(text="x" * 60_000))
            one.send(NoteMessage(text="y" * 60_000))  # more than an unknown client may send
            await until(lambda: len(led.events.from_members) == 2)
            assert led.events.gone == events.gone == []

    asyncio.run(meet())


def test_mutated_handshakes_leave_no_trace() -> None:
    chance = random.Random(20)  # a fixed seed: the same input on every machine

    async def lie(led: RunningLeader) -> None:
        # A busy machine may exceed the leader's patience, which then closes the connection during the handshake.
        with contextlib.suppress(aiohttp.ClientError):
            await speak(led)

    async def speak(led: RunningLeader) -> None:
        async with raw_client(led.port) as client:
            content = mutated(client.join_request(), chance)
            if chance.randrange(2):
                await client.ws.send_bytes(content)
            else:  # invalid content, although the client has the token
                await client.ws.send_bytes(client.join_request(words=mutated(messages.encode(arrival(1)), chance)))
            await client.ws.receive(60)

    async def call(led: RunningLeader) -> None:
        await conversation(led.port, mutated(REQUEST, chance) + chance.randbytes(chance.randrange(60)))

    async def meet() -> None:
        # The leader expects so many nodes that these clients cannot complete the rendezvous.
        async with leading(1000, timing=FAST) as led:
            for _ in range(8):
                async with asyncio.timeout(120):
                    await asyncio.gather(*(lie(led) for _ in range(20)), *(call(led) for _ in range(20)))
            await until(lambda: not led.ids)
            async with joined(led.port, 999):
                assert led.ids == {999}

    asyncio.run(meet())


# -- a leader in a separate process


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
    "a handshake": b"\x16\x03\x01\x40\x00\x01\xff\xff\xff",
}


def test_floods_of_connections_are_dropped(led: Handle) -> None:
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
                # A frame that is not the last of its message, repeated.
                block = (b"\x02\xfe\xff\xff" + b"mask" + b"x" * 65535) if kind == "frames" else b"x" * 65536
                sent = await asyncio.wait_for(asyncio.gather(*(pour(start, block) for _ in range(4))), 30)
                assert max(sent) < LARGE / 4, kind
            assert resident(led.pid, "VmHWM") - before < 6 << 20
            assert "lost" not in led.out

    asyncio.run(meet())


@pytest.mark.extended
def test_thousands_of_unknown_clients_keep_no_member_out(led: Handle) -> None:
    port = port_of(led)
    assert f"port {port} files 1024" in led.out

    def files() -> int:
        return len(os.listdir(f"/proc/{led.pid}/fd"))

    async def meet() -> None:
        with actor("clients", str(port), "2000") as crowd:
            await asyncio.to_thread(crowd.wait_for, "called")
            assert files() <= server.MOST + 4 * server.AT_ONCE
            began = time.monotonic()
            async with joined(port) as (_, events):
                assert time.monotonic() - began < 20  # on a busy machine; without the gate it takes minutes
                with actor("clients", str(port), "2000") as more:
                    await asyncio.to_thread(more.wait_for, "called")
                    assert files() <= server.MOST + 4 * server.AT_ONCE
                assert events.gone == []

    asyncio.run(meet())
    led.wait_for("received 1 Leaving")
    assert "lost" not in led.out
    assert led.err == ""


def test_a_client_that_opens_many_connections_blocks_only_itself() -> None:
    async def meet() -> None:
        async with leading(timing=Timing(patience=5)) as led:
            early = await asyncio.open_connection("127.0.0.1", led.port)
            crowd = []
            for _ in range(server.MOST + 100):
                crowd.append(await asyncio.open_connection("127.0.0.1", led.port, local_addr=("127.0.0.3", 0)))
            assert await asyncio.wait_for(crowd[0][0].read(), 5) == b""  # the oldest connection was closed
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
        ((1024, 1 << 20), 4096, [(4096 + server.MOST + 3 * server.AT_ONCE + 256, 1 << 20)]),
        ((1024, 4500), 4096, [(4500, 4500)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4096, []),
    ]:
        asked.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        server.make_room(members)
        assert asked == wanted
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(JoinError, match="4096 nodes cannot join: the limit of open files is 4096"):
        server.make_room(4096)
