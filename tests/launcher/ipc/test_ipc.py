"""Requests and replies, packets of workers, and the limits of received data."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phalanx.contract import encoding
from phalanx.contract.encoding import Decoder
from phalanx.control.messages import RpcFrame
from phalanx.control.outbox import LimitExceededError
from phalanx.forkserver import linux, wire
from phalanx.launcher.ipc import node_rpc
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.ipc.packet_server import PacketServer
from phalanx.launcher.ipc.pending_replies import PendingReplies


def test_a_reply_counts_only_from_the_peer_that_was_asked() -> None:
    async def scene() -> None:
        pending: PendingReplies[str] = PendingReplies()
        numbers: list[int] = []
        first = asyncio.create_task(pending.request(numbers.append, timeout=10, peer=1))
        second = asyncio.create_task(pending.request(numbers.append, timeout=10, peer=2))
        await asyncio.sleep(0)
        assert numbers == [1, 2]
        assert not pending.resolve(1, "forged", peer=2)
        assert pending.resolve(2, "two", peer=2)
        assert pending.resolve(1, "one", peer=1)
        assert pending.resolve(1, "again", peer=1)
        assert (await first, await second) == ("one", "two")
        assert not pending.resolve(1, "late", peer=1)

    asyncio.run(scene())


def test_a_request_ends_with_its_timeout_or_its_channel() -> None:
    def fails(_: int) -> None:
        raise BrokenPipeError

    async def scene() -> None:
        pending: PendingReplies[str] = PendingReplies()
        with pytest.raises(TimeoutError):
            await pending.request(lambda _: None, timeout=0.01)
        with pytest.raises(BrokenPipeError):
            await pending.request(fails, timeout=10)
        waiting = asyncio.create_task(pending.request(lambda _: None, timeout=None))
        await asyncio.sleep(0)
        pending.fail_all(ConnectionResetError())
        with pytest.raises(ConnectionResetError):
            await waiting
        assert not pending._pending

    asyncio.run(scene())


class Side:
    """A node that is connected to one other."""

    def __init__(self, *, leads: bool) -> None:
        self.leads = leads
        self.rpc = NodeRpc(self)  # type: ignore[arg-type]
        self.other: Side
        self.behind = 0  # bytes that the other has not received

    def send_rpc(self, frame: RpcFrame, to: int | None) -> None:
        assert to == (1 if self.leads else None)
        asyncio.get_running_loop().call_soon(self.other.rpc.receive, None if self.leads else 1, frame)

    def backlog(self, to: int | None) -> int:
        return self.behind


def test_a_node_asks_another(caplog: pytest.LogCaptureFixture) -> None:
    async def echo(sender: int | None, content: bytes) -> bytes:
        return b"%r %d" % (sender, len(content))

    async def fails(*_: object) -> bytes:
        raise ValueError("of no use")

    async def scene() -> None:
        leader, member = Side(leads=True), Side(leads=False)
        leader.other, member.other = member, leader
        for side in (leader, member):
            side.rpc.serve("echo", echo)
            side.rpc.serve("fails", fails)
        assert await leader.rpc.request("echo", bytes(1 << 20), timeout=10, to=1) == b"None 1048576"
        assert await member.rpc.request("echo", b"x", timeout=10) == b"1 1"
        assert await leader.rpc.request("echo", timeout=10) == b"None 0"  # itself
        for kind in ("fails", "unknown"):
            with pytest.raises(TimeoutError):
                await member.rpc.request(kind, timeout=0.05)

    asyncio.run(scene())
    assert "cannot answer the request 'fails' of node 1" in caplog.text


def test_questions_of_a_node_are_limited() -> None:
    async def scene() -> None:
        leader, asked, answered = Side(leads=True), 0, asyncio.Event()
        sent: list[RpcFrame] = []
        leader.send_rpc = lambda frame, to: sent.append(frame)  # type: ignore[method-assign]

        async def slow(sender: int | None, content: bytes) -> bytes:
            nonlocal asked
            asked += 1
            await answered.wait()
            return b"answer"

        leader.rpc.serve("slow", slow)
        ask = RpcFrame(kind="slow", number=1)
        for _ in range(node_rpc.MOST_QUESTIONS):
            leader.rpc.receive(1, ask)
        with pytest.raises(LimitExceededError, match="it has 64 open questions, and asks another one"):
            leader.rpc.receive(1, ask)
        leader.rpc.receive(2, ask)  # the limit is per node
        large = RpcFrame(kind="slow", number=1, content=bytes(1 << 18))
        for _ in range(4):
            leader.rpc.receive(2, large)
        with pytest.raises(LimitExceededError, match="its open questions have more than 1 MiB"):
            leader.rpc.receive(2, large)
        await asyncio.sleep(0.01)
        assert asked == 8 + 5  # the others wait until those are answered
        leader.behind = 1 << 30
        answered.set()
        await asyncio.sleep(0.2)
        assert not sent  # nor are replies queued for a node that does not read
        leader.behind = 0
        while len(sent) < node_rpc.MOST_QUESTIONS + 5:
            await asyncio.sleep(0.01)
        leader.rpc.receive(1, ask)  # there is room again
        leader.rpc.close()
        leader.rpc.receive(1, ask)  # no answer any more

    asyncio.run(scene())


def test_a_node_does_not_ask_more_than_it_may() -> None:
    async def scene() -> None:
        member = Side(leads=False)
        sent: list[RpcFrame] = []
        member.send_rpc = lambda frame, to: sent.append(frame)  # type: ignore[method-assign]
        asking = [asyncio.create_task(member.rpc.request("x", timeout=60)) for _ in range(20)]
        await asyncio.sleep(0.01)
        assert len(sent) == node_rpc.ASKED
        for frame in list(sent):
            member.rpc.receive(None, RpcFrame(kind="reply", number=frame.number))
        while len(sent) < 2 * node_rpc.ASKED:
            await asyncio.sleep(0.01)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(scene())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000], ids=lambda body: repr(body[:3]))
def test_a_malformed_message_is_an_error_and_not_the_end(body: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(len(body).to_bytes(4, "big") + body)
        with pytest.raises(ValueError):  # noqa: PT011 - of json
            wire.receive(right)


def test_a_message_over_the_limit_is_not_read() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(wire.encode({"text": "x" * 1000}))
        with pytest.raises(ValueError, match="1012 bytes"):
            wire.receive(right, limit=1000)
        assert len(right.recv(1 << 16)) == 1012  # only the header was


def test_announced_bytes_are_not_allocated_before_they_arrive() -> None:
    reader = wire.MessageReader()
    assert reader.feed(wire.LIMIT.to_bytes(4, "big")) is None
    assert reader.missing == 1 << 20


def test_the_kernel_says_who_calls() -> None:
    left, right = socket.socketpair()
    with left, right:
        peer = linux.peer(left)
    assert peer == (os.getpid(), os.getuid())
    assert peer.is_same_user
    assert not linux.SocketPeer(1, os.getuid() + 1).is_same_user


class Note(msgspec.Struct, frozen=True, tag="note"):
    text: str


async def until(done: Any) -> None:
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert done()


def test_only_valid_messages_of_workers_are_accepted() -> None:
    received: list[str] = []
    known = SimpleNamespace(pid=os.getpid())

    def call(name: str, *packets: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(f"\0{name}")
        for packet in packets:
            sock.send(packet)
        return sock

    async def scene() -> None:
        decoder: Decoder[Note] = Decoder(Note)
        server = PacketServer(
            "phalanx-test", decoder, lambda pid: pid == known.pid, lambda _, note: received.append(note.text)
        )
        with call(server.name, encoding.encode(Note("one")), encoding.encode(Note("\udcff"))):
            await until(lambda: received == ["one", "\\xff"])
            assert list(server.connections.values()) == [os.getpid()]
        await until(lambda: not server.connections)
        for packet in (b"{", b"\xff", b'{"type":"other"}', b"[" * 60_000):
            with call(server.name, packet) as sock:
                sock.settimeout(10)
                assert await asyncio.to_thread(sock.recv, 1) == b""
        known.pid = 1
        with call(server.name) as sock:
            sock.settimeout(10)
            assert await asyncio.to_thread(sock.recv, 1) == b""
        server.close()
        server.close()

    asyncio.run(scene())
    assert received == ["one", "\\xff"]


_CONNECTS = """
import socket, sys, time
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(chr(0) + sys.argv[1])
time.sleep(600)
"""


def test_a_killed_worker_is_noticed_before_it_is_reaped() -> None:
    closed: list[int] = []

    async def scene() -> None:
        server: PacketServer[Note] = PacketServer(
            "phalanx-test", Decoder(Note), lambda _: True, lambda *_: None, closed.append
        )
        worker = subprocess.Popen([sys.executable, "-S", "-c", _CONNECTS, server.name])
        try:
            await until(lambda: [*server.connections.values()] == [worker.pid])
            assert not linux.is_being_killed(worker.pid)
            worker.kill()
            await until(lambda: closed == [worker.pid])  # it is not reaped yet
            await until(lambda: linux.is_being_killed(worker.pid))
        finally:
            worker.kill()
            worker.wait()
        assert not linux.is_being_killed(worker.pid)
        server.close()

    asyncio.run(scene())


@pytest.mark.parametrize("end", ["import os; os._exit(9)", "import os; os.kill(os.getpid(), 15)"])
def test_only_sigkill_counts_as_killed(end: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", end])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not linux.is_being_killed(process.pid)
    process.wait()


def test_decoding_raises_one_kind_of_error() -> None:
    decoders: tuple[Decoder[dict[str, Any]], ...] = (Decoder(dict[str, Any]), Decoder(dict[str, Any], "msgpack"))
    for decoder in decoders:
        for data in (b"", b"\xff", b'{"\xff": 1}', b"[" * 100_000, b"\x81\xa1\xff\x01", b"\x91" * 100_000, b"7"):
            with pytest.raises(msgspec.DecodeError):
                decoder.decode(data)
    assert Decoder[Any](Any).decode(json.dumps({"a": 1}).encode()) == {"a": 1}
