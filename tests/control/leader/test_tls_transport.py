"""The leader's end of TLS connections, on real sockets: order, flow control, how connections end, and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from phalanx.control import tls
from phalanx.control.leader import tls_transport
from phalanx.control.leader.tls_transport import TlsTransport
from tests.control.parties import OTHER, TOKEN, until

MIB = 1 << 20
SERVER = tls.server_context(TOKEN)
CLIENT = tls.client_context(TOKEN)


class Recorder(asyncio.Protocol):
    """Records what a transport reports."""

    def __init__(self) -> None:
        self.received = b""
        self.paused = 0
        self.writable = True
        self.lost: list[Exception | None] = []

    def data_received(self, data: bytes) -> None:
        self.received += data

    def pause_writing(self) -> None:
        assert self.writable
        self.paused, self.writable = self.paused + 1, False

    def resume_writing(self) -> None:
        assert not self.writable
        self.writable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


@dataclass
class Pair:
    """Both ends of a connection."""

    transport: TlsTransport
    recorder: Recorder
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    raw: socket.socket = field(repr=False)  # the client's socket


@contextlib.asynccontextmanager
async def connected(*, close_timeout: float = 60.0) -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    recorder = Recorder()
    accepting = asyncio.create_task(
        tls_transport.accept(ours, SERVER, lambda: recorder, timeout=60, close_timeout=close_timeout)
    )
    reader, writer = await asyncio.open_connection(sock=theirs, ssl=CLIENT, server_hostname="")
    transport = await accepting
    try:
        yield Pair(transport, recorder, reader, writer, theirs)
    finally:
        transport.abort()
        writer.transport.abort()
        await until(lambda: bool(recorder.lost))


def test_both_sides_receive_what_the_other_sends_in_order() -> None:
    async def exchange() -> None:
        async with connected() as pair:
            for number in range(300):
                pair.writer.write(b"%d," % number)
                pair.transport.write(b"%d;" % number)
            await until(lambda: pair.recorder.received.endswith(b"299,"))
            assert pair.recorder.received == b"".join(b"%d," % number for number in range(300))
            sent = b"".join(b"%d;" % number for number in range(300))
            assert await pair.reader.readexactly(len(sent)) == sent
            assert pair.transport.get_extra_info("ssl_object").version() == "TLSv1.3"

    asyncio.run(exchange())


def test_a_peer_that_does_not_read_pauses_the_protocol_and_loses_nothing() -> None:
    async def exchange() -> None:
        async with connected() as pair:
            content = bytes(range(256)) * (4 * MIB // 256)
            for at in range(0, len(content), 100_000):
                pair.transport.write(content[at : at + 100_000])
            assert pair.recorder.paused == 1
            assert pair.transport.get_write_buffer_size() > MIB
            assert await pair.reader.readexactly(len(content)) == content
            await until(lambda: pair.recorder.writable)
            assert pair.transport.get_write_buffer_size() == 0

    asyncio.run(exchange())


def test_nothing_is_received_while_reading_is_paused() -> None:
    async def exchange() -> None:
        async with connected() as pair:
            pair.transport.pause_reading()
            pair.writer.write(b"x" * 100_000)
            await pair.writer.drain()
            pair.transport.write(b"another turn")
            assert await pair.reader.readexactly(12) == b"another turn"
            assert pair.recorder.received == b""
            pair.transport.resume_reading()
            await until(lambda: len(pair.recorder.received) == 100_000)

    asyncio.run(exchange())


def test_a_protocol_that_pauses_gets_the_next_record_when_it_resumes() -> None:

    async def exchange() -> None:
        async with connected() as pair:
            read, recorder = pair.recorder.data_received, pair.recorder

            def pausing(data: bytes) -> None:
                read(data)
                pair.transport.pause_reading()

            recorder.data_received = pausing  # type: ignore[method-assign]
            pair.writer.write(b"a")
            pair.writer.write(b"b")
            await until(lambda: recorder.received == b"a")
            pair.transport.resume_reading()
            await until(lambda: recorder.received == b"ab")

    asyncio.run(exchange())


def test_close_sends_what_is_queued_although_the_peer_sends_too() -> None:
    async def exchange() -> None:
        async with connected() as pair:
            content = b"y" * (2 * MIB)
            pair.writer.write(b"nobody reads this")
            pair.transport.write(content)
            pair.transport.close()
            pair.transport.write(b"too late")
            assert pair.transport.is_closing()
            assert await pair.reader.read() == content
            pair.writer.close()
            await until(lambda: bool(pair.recorder.lost))
            assert pair.recorder.lost == [None]
            assert pair.recorder.received == b""

    asyncio.run(exchange())


def test_close_does_not_wait_for_ever() -> None:
    async def exchange() -> None:
        async with connected(close_timeout=0.2) as pair:
            pair.transport.write(b"z" * (4 * MIB))  # never read by the client
            pair.transport.close()
            await until(lambda: bool(pair.recorder.lost))

    asyncio.run(exchange())


def end(pair: Pair) -> None:
    pair.writer.close()


def die(pair: Pair) -> None:
    pair.writer.transport.abort()


@pytest.mark.parametrize("how", [end, die])
def test_the_end_of_the_peer_is_reported_once(how: Callable[[Pair], None]) -> None:
    async def exchange() -> None:
        async with connected() as pair:
            how(pair)
            await until(lambda: bool(pair.recorder.lost))
            pair.transport.write(b"nobody is there")
            pair.transport.close()
            pair.transport.abort()
            await asyncio.sleep(0)
            assert len(pair.recorder.lost) == 1
            assert pair.transport.is_closing()

    asyncio.run(exchange())


def test_tampering_ends_the_connection_with_the_error() -> None:
    async def exchange() -> None:
        async with connected() as pair:
            pair.raw.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a TLS record that is not encrypted
            await until(lambda: bool(pair.recorder.lost))
            assert isinstance(pair.recorder.lost[0], ssl.SSLError)
            assert pair.recorder.received == b""

    asyncio.run(exchange())


def test_an_error_of_the_protocol_is_logged_and_ends_the_connection() -> None:
    async def exchange() -> None:
        async with connected() as pair:
            logged: list[dict[str, object]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
            error = ValueError("not a frame")

            def fail(data: bytes) -> None:
                raise error

            pair.recorder.data_received = fail  # type: ignore[method-assign]
            pair.writer.write(b"x")
            await until(lambda: bool(pair.recorder.lost))
            assert pair.recorder.lost == [error]
            assert [context["exception"] for context in logged] == [error]

    asyncio.run(exchange())


def test_a_peer_with_another_token_is_not_accepted() -> None:
    async def exchange() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        recorder = Recorder()
        peer = asyncio.create_task(
            asyncio.open_connection(sock=theirs, ssl=tls.client_context(OTHER), server_hostname="")
        )
        with pytest.raises(ssl.SSLError):
            await tls_transport.accept(ours, SERVER, lambda: recorder, timeout=60, close_timeout=1)
        assert ours.fileno() < 0
        with pytest.raises(ssl.SSLCertVerificationError):
            await peer
        assert recorder.lost == []

    asyncio.run(exchange())


def test_a_caller_that_says_nothing_is_not_waited_for() -> None:
    async def exchange() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            with pytest.raises(TimeoutError):
                await tls_transport.accept(ours, SERVER, Recorder, timeout=0.1, close_timeout=1)
            assert theirs.recv(1) == b""  # the connection is closed

    asyncio.run(exchange())


def test_a_connection_costs_little_memory() -> None:
    async def exchange() -> None:
        async with connected():  # imports and caches of the first connection do not count
            pass
        kept: list[TlsTransport | ssl.SSLSocket] = []
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(8):
                ours, theirs = socket.socketpair()
                ours.setblocking(False)
                recorder = Recorder()
                accepting = asyncio.create_task(
                    tls_transport.accept(ours, SERVER, lambda: recorder, timeout=60, close_timeout=1)  # noqa: B023
                )
                client = await asyncio.to_thread(CLIENT.wrap_socket, theirs)
                kept += [client, await accepting]
                client.send(b"m" * 5000)
                await until(lambda: len(recorder.received) == 5000)  # noqa: B023
            grown = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            for end in kept:
                end.close()
        assert grown < 8 * (1 << 16)

    asyncio.run(exchange())
