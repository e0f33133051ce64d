"""A stream over RPC frames: bytes both ways, the end of one direction, the end of both, and lost ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from phalanx.launcher.ipc.stream_proxy import WINDOW, StreamProxy


class Pair:
    """Two nodes: messages of one arrive at the other a moment later."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: list[str] = []
        self.left, near = socket.socketpair()
        self.right, far = socket.socketpair()
        self.a = StreamProxy(
            0, lambda letter: loop.call_soon(self.b.receive, letter[:1], letter[1:]) and None, self._end("a")
        )
        self.b = StreamProxy(
            0, lambda letter: loop.call_soon(self.a.receive, letter[:1], letter[1:]) and None, self._end("b")
        )
        self.a.start(near)
        self._far = far
        for sock in (self.left, self.right):
            sock.setblocking(False)

    def meet(self) -> None:
        self.b.start(self._far)

    def _end(self, name: str) -> Callable[[], None]:
        return lambda: self.ended.append(name)

    async def until_ended(self) -> None:
        async with asyncio.timeout(60):
            while sorted(self.ended) != ["a", "b"]:
                await asyncio.sleep(0.001)


async def read(sock: socket.socket) -> bytes:
    """Read to the end."""
    found = b""
    with suppress(ConnectionResetError):
        while data := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1 << 16), 20):
            found += data
    return found


def test_bytes_both_ways_and_one_direction_after_the_other() -> None:
    async def scenario() -> None:
        pair, loop = Pair(), asyncio.get_running_loop()
        question, answer = b"where\n" * 20_000, b"> here\n" * 50_000
        await loop.sock_sendall(pair.left, b"early\n")
        await asyncio.sleep(0.01)
        pair.meet()
        sending = loop.create_task(loop.sock_sendall(pair.left, question))
        found = b""
        while len(found) < len(question) + 6:
            found += await asyncio.wait_for(loop.sock_recv(pair.right, 1 << 16), 20)
        await sending
        assert found == b"early\n" + question
        pair.left.shutdown(socket.SHUT_WR)
        assert await read(pair.right) == b""
        assert not pair.ended  # the answer is still to come
        reading = loop.create_task(read(pair.left))
        await loop.sock_sendall(pair.right, answer)
        pair.right.close()
        assert await reading == answer
        await pair.until_ended()
        pair.left.close()

    asyncio.run(scenario())


def test_a_lost_end_closes_the_other() -> None:
    async def scenario() -> None:
        for lost in ("left", "right", "node"):
            pair = Pair()
            pair.meet()
            await asyncio.get_running_loop().sock_sendall(pair.left, b"p 1\n")
            await asyncio.get_running_loop().sock_recv(pair.right, 16)
            if lost == "node":
                pair.a.close()
            else:
                gone: socket.socket = getattr(pair, lost)
                gone.close()
                stays = pair.right if lost == "left" else pair.left
                assert await read(stays) == b""
                stays.close()
            await pair.until_ended()
            for sock in (pair.left, pair.right):
                sock.close()

    asyncio.run(scenario())


def test_who_does_not_read_holds_back_who_writes() -> None:
    async def scenario() -> None:
        pair, loop = Pair(), asyncio.get_running_loop()
        pair.meet()
        much = b"p everything\n" * 300_000
        sending = loop.create_task(loop.sock_sendall(pair.left, much))
        before = -1
        while pair.a._in_flight < WINDOW or before != pair.a._in_flight:  # until it is full and nothing moves
            before = pair.a._in_flight
            await asyncio.sleep(0.1)
        assert before < 2 * WINDOW
        assert not sending.done()
        found = 0
        while found < len(much):
            found += len(await asyncio.wait_for(loop.sock_recv(pair.right, 1 << 20), 20))
        await sending
        pair.left.close()
        assert await read(pair.right) == b""
        pair.right.close()
        await pair.until_ended()

    asyncio.run(scenario())
