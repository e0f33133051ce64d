"""What a probe of the leader's port finds on this host, and the text of refusals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from phalanx.control.member import join_problems
from phalanx.control.member.join_problems import JoinProblem

HELLO = b"GET /phalanx HTTP/1.1\r\n\r\n"
EXPECTED = b"phalanx-leader"
GREETING = b"HTTP/1.1 200 OK\r\nserver: phalanx-leader\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def ask(host: str, port: int, timeout: float = 10) -> JoinProblem | None:
    return await join_problems.probe(host, port, timeout=timeout, hello=HELLO, expected=EXPECTED)


def served(handler: Handler, *, timeout: float = 10) -> tuple[JoinProblem | None, int]:
    """Return what a probe reports about a server with this handler, and its port."""

    async def meet() -> tuple[JoinProblem | None, int]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                await reader.readexactly(len(HELLO))
                await handler(reader, writer)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask("127.0.0.1", port, timeout), port

    return asyncio.run(meet())


def says(*parts: bytes) -> Handler:
    """Return a handler that sends the parts in separate packets, as far as the network allows."""

    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return handle


async def stay(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    assert await reader.read() == b""  # until the client gives up


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("parts", [(GREETING,), (GREETING[:30], GREETING[30:]), (b"x" * 3000, GREETING)])
def test_a_leader_is_not_a_problem(parts: tuple[bytes, ...]) -> None:
    assert served(says(*parts))[0] is None


def test_a_leader_that_keeps_the_connection_open_is_not_waited_for() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await stay(reader, writer)

    assert served(handle, timeout=100)[0] is None


def test_nothing_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # reserves the port without listening
        port = sock.getsockname()[1]
        found = asyncio.run(ask("127.0.0.1", port))
    assert found == JoinProblem(
        "refused",
        f"127.0.0.1 is up, but nothing listens on its port {port}",
        (f"127.0.0.1 port {port}, which is this machine itself: the connection was refused",),
        "start node 0, or give its port: --master-port PORT (is node 0 another machine? --master ADDRESS)",
    )


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0-OpenSSH_9.2"),
        (b"HTTP/1.0 400 Bad Request\r\nx: y\r\n\r\n", "HTTP/1.0 400 Bad Request..x: y"),
        (b"\x15\x03\x01\0\x02\x02F", "......F"),
        (b"\x1b]0;owned\x07\x9b31m\xc3\xa9", ".]0;owned..31m.."),
        (b"a" * 60, "a" * 60),
        (b"b" * 5000 + EXPECTED, "b" * 59 + "…"),
    ],
)
def test_another_program_listens(answer: bytes, shown: str) -> None:
    found, port = served(says(answer))
    assert found is not None
    assert (found.kind, found.certain) == ("not-phalanx", False)
    assert found.what == f"what listens on 127.0.0.1 port {port} is not phalanx"
    assert found.details == (f'127.0.0.1 port {port}: answered "{shown}"',)


def test_another_program_that_answers_and_then_waits() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail")
        await stay(reader, writer)

    found, _ = served(handle, timeout=0.3)
    assert found is not None
    assert found.kind == "not-phalanx"
    assert '"220 mail"' in found.details[0]


@pytest.mark.parametrize(
    ("handler", "end"),
    [
        (stay, "but sent nothing in 0.3 s"),
        (says(), "and closed it without a reply"),
        (reset, "and broke it: Connection reset by peer"),
    ],
)
def test_a_listener_that_does_not_answer(handler: Handler, end: str) -> None:
    found, port = served(handler, timeout=0.3)
    assert found is not None
    assert (found.kind, found.certain) == ("silent", False)
    assert found.details == (f"127.0.0.1 port {port}: accepted the connection, {end}",)


@pytest.mark.parametrize("host", ["", "a" * 64, "x\0y", "a..b"])
def test_invalid_host_names(host: str) -> None:
    found = asyncio.run(ask(host, 29500))
    assert found is not None
    assert (found.kind, found.certain) == ("unresolved", False)
    assert "\0" not in found.what
    assert "--master ADDRESS" in found.fix


def test_a_slow_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        release.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        start = time.monotonic()
        found = asyncio.run(ask("gpu-a", 29500, 0.1))
        assert time.monotonic() - start < 10  # closing the event loop does not wait for it either
    finally:
        release.set()
    assert found is not None
    assert found.kind == "unresolved"
    assert found.details == ("the name service did not answer in 0.1 s",)


def test_lines_of_a_hosts_file() -> None:
    text = (
        "127.0.0.1 localhost\n127.0.1.1\tGPU-a.lab  gpu-a # own\n"
        "#127.0.1.1 gpu-b\n192.0.2.2 gpu-b\n\n::1 gpu-a gpu-aa\n"
    )
    assert join_problems._hosts_lines("gpu-a", text) == (
        "/etc/hosts:2: 127.0.1.1 GPU-a.lab gpu-a # own",
        "/etc/hosts:6: ::1 gpu-a gpu-aa",
    )
    assert join_problems._hosts_lines("gpu-A.LAB.", text) == ("/etc/hosts:2: 127.0.1.1 GPU-a.lab gpu-a # own",)
    assert join_problems._hosts_lines("gpu-b", text) == ()
    assert join_problems._hosts_lines("own", text) == ()


@pytest.mark.parametrize(
    ("kinds", "best"),
    [
        (["unreachable", "refused"], "refused"),
        (["filtered", "unreachable"], "filtered"),
        (["refused", "not-phalanx", "silent"], "not-phalanx"),
        (["other", "unreachable"], "unreachable"),
        (["other"], "other"),
    ],
)
def test_the_address_that_got_furthest_counts(kinds: list[join_problems.Kind], best: str) -> None:
    found = [JoinProblem(kind, f"detail {kind}") for kind in kinds]
    addresses = [f"192.0.2.{number}" for number in range(len(kinds))]
    problem = join_problems._most_telling("gpu-a", 29500, addresses, found)
    assert problem.kind == best
    assert f"gpu-a (192.0.2.{kinds.index(problem.kind)})" in problem.what
    assert problem.details == tuple(f"detail {kind}" for kind in kinds)
    assert problem.fix


@pytest.mark.parametrize(
    ("kind", "mine", "theirs", "words"),
    [
        ("token", "PHALANX_TOKEN (fingerprint ab12cd34)", "/home/u/token (fingerprint 99ff0011)", "--token-file FILE"),
        ("run", "train-1", "train-2", "leads another run"),
        ("plan", "world size 4", "world size 6", "the same command on every node"),
        ("version", "torch 2.13.0", "torch 2.11.0", "the same versions"),
        ("taken", "node 2", "gpu-c", "node 2 of this run is already there: gpu-c"),
        ("devices", "3 workers", "4 workers", "has 3 workers, but 4 workers were expected"),
        ("other", "this", "that", "refuses this node"),
    ],
)
def test_a_refusal_names_both_sides_and_a_fix(kind: join_problems.Kind, mine: str, theirs: str, words: str) -> None:
    found = join_problems.refusal(kind, mine=mine, theirs=theirs, leader="gpu-a:29500")
    text = "\n".join((found.what, *found.details, found.fix))
    assert (found.kind, found.certain) == (kind, True)
    for part in (mine, theirs, words, "node 0 (gpu-a:29500)"):
        assert part in text
    assert found.fix or kind == "other"


def test_escape_sequences_in_a_refusal_are_quoted() -> None:
    found = join_problems.refusal("plan", mine="a", theirs="\x1b[2J\n" + "x" * 1000, leader="gpu-a")
    assert found.details[1] == f"node 0 (gpu-a): .[2J.{'x' * 194}…"


def test_an_unknown_kind_of_refusal_is_other() -> None:
    assert join_problems.refusal("silent", mine="a", theirs="b", leader="gpu-a").kind == "other"
