"""Permissions of debuggers, limits for broken or malicious nodes, and access to an agent."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.contract import encoding
from phalanx.control import messages
from phalanx.control.messages import RpcFrame
from phalanx.control.outbox import LimitExceededError
from phalanx.errors import LaunchError
from phalanx.forkserver import linux, wire
from phalanx.forkserver.debug import debugger, terminal
from phalanx.forkserver.debug.terminal import TerminalStream
from phalanx.launcher.debug import messages as debug_messages
from phalanx.launcher.debug.attachment import Attachment, AttachRefused
from phalanx.launcher.debug.messages import AtBreakpoint, DebuggedHere
from phalanx.launcher.debug.remote_streams import ATTACH, KIND, AttachRequest
from phalanx.launcher.debug.sessions import DebugSessions
from phalanx.launcher.ipc import control_messages, control_socket
from phalanx.launcher.ipc.control_messages import QueryRefused, SearchQuery, SearchReply, WhyQuery, WhyReply
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.rendezvous_config import AttachFrom
from phalanx.watch.source import SearchResult


class Workers(dict[str, Any]):
    debugged: frozenset[int] = frozenset()


class Network:
    """RPC frames between node 0 and the others, delivered one after another."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.letters: deque[tuple[int, int | None, RpcFrame]] = deque()  # to whom, from whom
        self.carried = 0

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
            for _ in range(len(self.letters)):
                to, who, letter = self.letters.popleft()
                self.carried += 1
                self.nodes[to].rpc.receive(who, letter)
        assert not self.letters


class Node:
    """A node with one rank of the same number."""

    def __init__(
        self,
        network: Network,
        number: int,
        size: int,
        *,
        trusted: bool = True,
        attach_from: AttachFrom = "all",
    ) -> None:
        self.number, self.network, self.leads = number, network, number == 0
        self.size = size
        network.nodes[number] = self
        self.asked: list[str] = []
        self.notes: list[str] = []
        self.rpc = NodeRpc(self)
        worker = SimpleNamespace(seat=SimpleNamespace(rank=number), spare=False, code=None, probe=self)
        self.attempt: Any = SimpleNamespace(workers=Workers({"0": worker}), world_size=size, living=[("0", worker)])
        self.status = SimpleNamespace(looked=1.0)
        self.comes = True
        console: Any = SimpleNamespace(say=self.notes.append, terminal=lambda _: False)
        folder: Any = SimpleNamespace(name="run")
        self.debugging = DebugSessions(
            self, self, self.rpc, console=console, folder=folder, trusted=trusted, attach_from=attach_from
        )

    # the links

    def members(self) -> dict[int, tuple[int, ...]]:
        return {number: (number,) for number in range(1, self.size)} if self.leads else {}

    def send_rpc(self, frame: RpcFrame, to: int | None) -> None:
        self.network.letters.append((0 if to is None else to, None if self.leads else self.number, frame))

    def backlog(self, to: int | None) -> int:
        return 0

    # the agent, and the probe of its worker

    def note(self, text: str) -> None: ...

    def send(self, what: str) -> None:
        self.asked.append(what)

    async def ask(self, what: str, **_: object) -> wire.Message | None:
        self.asked.append(what)
        return {"came": self.comes} if what == "interrupt" else {"how": "stopped"}


def run_scene(scene: Callable[[Network], Awaitable[None]]) -> None:
    async def whole() -> None:
        network = Network()
        try:
            await asyncio.wait_for(scene(network), 20)
        finally:
            for node in network.nodes.values():
                node.debugging.close()

    asyncio.run(whole())


async def opened(network: Network, node: Node, rank: int) -> Attachment:
    asking = asyncio.create_task(node.debugging.open(rank, by="me"))
    while not asking.done():
        await network.settle()
    return asking.result()


def test_ctrl_c_from_one_node_to_another_goes_one_way() -> None:
    async def scene(network: Network) -> None:
        nodes = [Node(network, number, 3) for number in range(3)]
        found = await opened(network, nodes[1], 2)
        before = network.carried
        nodes[2].comes = False
        assert await nodes[1].debugging.interrupt(2)
        await network.settle()
        assert nodes[2].asked.count("interrupt") == 1
        assert network.carried - before < 8
        assert found.sock is not None
        found.sock.close()

    run_scene(scene)


def test_attaching_from_another_node_needs_permission() -> None:
    async def scene(network: Network) -> None:
        nodes = [Node(network, number, 3, attach_from="leader") for number in range(3)]
        for rank in (0, 2):  # of node 0, and of another member
            with pytest.raises(AttachRefused, match="only node 0 may attach a debugger"):
                await opened(network, nodes[1], rank)
        assert not nodes[0].asked + nodes[2].asked
        for node in (nodes[0], nodes[1]):
            found = await opened(network, node, 1)  # from node 0, and on its own node
            assert found.sock is not None
            found.sock.close()
            network.nodes[1].debugging._ranks.workers.clear()
        closed = Node(network, 2, 3, attach_from="none")
        with pytest.raises(AttachRefused, match="--attach-from none"):
            await opened(network, nodes[0], 2)
        assert not closed.asked

    run_scene(scene)


def test_without_a_token_no_node_debugs_ranks_of_another() -> None:
    async def scene(network: Network) -> None:
        nodes = [Node(network, number, 2, trusted=False) for number in range(2)]
        with pytest.raises(AttachRefused, match="--no-auth"):
            await opened(network, nodes[1], 0)
        # A request without permission.
        ask = encoding.encode(AttachRequest(stream=3, rank=0, by="me"))
        nodes[0].rpc.receive(1, RpcFrame(kind=ATTACH, number=1, content=ask))
        await network.settle()
        assert not nodes[0].asked
        assert (await opened(network, nodes[0], 0)).how == "stopped"  # on its own node

    run_scene(scene)


async def flood(lead: Node) -> None:
    for number in range(3, 1003, 2):
        request = encoding.encode(AttachRequest(stream=number, rank=1))
        lead.rpc.receive(1, RpcFrame(kind=ATTACH, number=number, content=request))
        await asyncio.sleep(0)
        for data in (b"d" * 200_000, b"a-1", b"ax", b"e", b"c"):
            lead.rpc.receive(1, RpcFrame(kind=KIND, number=number, content=data))


def test_what_another_node_writes_may_be_anything() -> None:
    async def scene(network: Network) -> None:
        lead = Node(network, 0, 2)
        Node(network, 1, 2)
        deep = b"[" * 100_000
        for content in (b"", b"?", b"s{}", b"c"):
            lead.rpc.receive(1, RpcFrame(kind=KIND, number=3, content=content))
        unknown, endless = b'{"message":"x"}', b'{"message":"here","ranks":[1e999]}'
        for content in (b"", b"{}", b"[]", unknown, endless, b'{"message":"breakpoint"}', deep):
            lead.rpc.receive(1, RpcFrame(kind=debug_messages.KIND, number=3, content=content))
        for content in (b"", b"[]", b"{}", b'{"stream":3,"rank":1e999}', b'{"stream":2,"rank":1}', deep):
            lead.rpc.receive(1, RpcFrame(kind=ATTACH, number=3, content=content))
        await network.settle()
        assert not network.carried
        for message in (DebuggedHere(ranks=[0, 1, 7]), AtBreakpoint(rank=0, place="x.py:1")):
            content = encoding.encode(message)
            lead.rpc.receive(1, RpcFrame(kind=debug_messages.KIND, number=0, content=content))
        assert lead.attempt.workers.debugged == {1}  # only ranks of this node
        assert not lead.notes
        with pytest.raises(LimitExceededError):  # it is dropped
            await flood(lead)
        await asyncio.sleep(0)
        assert len(lead.debugging._streams) <= 2 * 64

    run_scene(scene)


def test_messages_that_never_end_or_are_too_long_cost_little_and_are_not_read() -> None:
    links: Any = SimpleNamespace(leads=True)
    post, read = NodeRpc(links), []
    post.on("k", lambda who, number, content: read.append((who, number, content)))
    part = bytes(messages.RPC_FRAME_LIMIT)
    for number in range(300):
        post.receive(1, RpcFrame(kind="k", number=number, content=part, more=True))
    assert sum(len(partial.content) for partial in post._partial.values()) == len(part)
    for _ in range(messages.RPC_LIMIT // len(part) + 3):
        post.receive(1, RpcFrame(kind="k", number=5, content=part, more=True))
    post.receive(2, RpcFrame(kind="k", number=5, content=b"a", more=True))
    post.receive(1, RpcFrame(kind="k", number=5, content=b"its end"))
    post.receive(2, RpcFrame(kind="k", number=5, content=b"b"))
    for _ in range(50_000):
        post.receive(3, RpcFrame(kind="k", number=5, content=b"x", more=True))
    post.receive(3, RpcFrame(kind="k", number=5))
    assert read == [(2, 5, b"ab"), (3, 5, b"x" * 50_000)]


def test_a_run_that_has_just_started_is_waited_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(id="run", pid=os.getpid(), folder=str(tmp_path), host="", alive=True)
    monkeypatch.setattr(control_socket, "STARTING", 0.05)
    with pytest.raises(LaunchError, match="it is starting: try again in a moment"):
        control_socket.call(run, WhyQuery())
    monkeypatch.setattr(control_socket, "STARTING", 60.0)
    server = socket.socket(socket.AF_UNIX)
    server.bind("")  # the kernel chooses an abstract address
    server.listen()
    named = server.getsockname().decode().removeprefix("\0")
    later = threading.Timer(0.1, (tmp_path / "control").write_text, [f"{named} key"])
    later.start()
    with server, control_socket.call(run, WhyQuery()):
        pass
    later.join()


def test_the_control_socket_answers_who_knows_the_key(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "HANDLER_TIMEOUT", 0.1)

    async def scene() -> None:
        folder: Any = SimpleNamespace(path=str(tmp_path))
        one = control_socket.ControlSocket(folder)

        async def answer(query: SearchQuery) -> SearchReply:
            return SearchReply(found=(SearchResult(rank=3, stream="stdout", at=0, line=query.text),))

        one.serve(SearchQuery, answer)
        assert os.stat(tmp_path / "control").st_mode & 0o777 == 0o600
        own = os.getpid()
        run: Any = SimpleNamespace(id="run", pid=own, folder=str(tmp_path), host="", started=linux.start_time(own))

        def ask(query: Any, kind: Any = SearchReply) -> Any:
            return control_socket.request(run, query, kind, timeout=10)

        assert (await asyncio.to_thread(ask, SearchQuery(text="\udcff"))).found[0].line == "\\xff"
        assert await asyncio.to_thread(ask, WhyQuery()) == QueryRefused(why="none of its ranks has started")
        wrong = await asyncio.to_thread(ask, SearchQuery(text=cast("str", 5)))
        assert wrong == QueryRefused(why="invalid query: Expected `str`, got `int` - at `$.text`")
        with pytest.raises(LaunchError, match="unexpected reply of run: SearchReply"):
            await asyncio.to_thread(ask, SearchQuery(text=""), WhyReply)
        monkeypatch.setattr(control_messages, "REPLY_LIMIT", 100)
        with pytest.raises(LaunchError, match="unreadable reply of the agent: a message of"):
            await asyncio.to_thread(ask, SearchQuery(text="x" * 100))
        name, key = (tmp_path / "control").read_text().split()
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(f"\0{name}")
        why = b'{"query":{"query":"why"},"key":"%s"}'
        for words in (b'{"query":{"query":"why"}}', why % key.encode()[:-1], b"[]", b"[" * 60_000):
            with socket.socket(socket.AF_UNIX) as foreign:
                foreign.connect(f"\0{name}")
                foreign.sendall(len(words).to_bytes(4, "big") + words)
                foreign.settimeout(10)
                assert await asyncio.to_thread(wire.receive, foreign) is None
        with socket.socket(socket.AF_UNIX) as long:
            long.connect(f"\0{name}")
            long.sendall(b"\xff\xff\xff\xff")
            assert await asyncio.to_thread(wire.receive, long) is None
        run.pid += 1
        with pytest.raises(LaunchError, match="another process"):
            await asyncio.to_thread(ask, WhyQuery())
        one.close()
        silent.close()
        assert not (tmp_path / "control").exists()

    asyncio.run(scene())


def test_a_debugger_that_is_through_is_so_although_a_child_has_its_socket() -> None:
    ours, theirs = socket.socketpair()
    child = ours.dup()  # a data loader's, forked while someone stepped
    TerminalStream(ours).close()
    theirs.settimeout(10)
    assert theirs.recv(1) == b""
    child.close()
    theirs.close()


@pytest.mark.parametrize(
    ("threads", "responds"),
    [
        ([(False, 0.0)], True),  # it waits for a core
        ([(False, 0.01 * number) for number in range(1000)], False),  # it computes in native code
        ([(True, 0.0)], False),  # it sleeps in native code
        ([None], False),
    ],
    ids=["no core", "computes", "sleeps", "unknown"],
)
def test_a_rank_that_gets_no_core_is_not_in_native_code(
    threads: list[tuple[bool, float] | None], responds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter(threads)
    monkeypatch.setattr(debugger, "_RESPONSE_TIMEOUT", 0.05)
    monkeypatch.setattr(debugger, "_LONGEST_RESPONSE", 120.0)
    monkeypatch.setattr(debugger, "_RESPONSE_INTERVAL", 0.01)
    responded = threading.Lock()
    responded.acquire()
    looks = 0

    def thread(_: int) -> tuple[bool, float] | None:
        nonlocal looks
        looks += 1
        if looks == 100:  # long after the timeout
            responded.release()
        return next(seen, threads[-1])

    monkeypatch.setattr(debugger.linux, "thread", thread)
    assert debugger._responds(responded) is responds


class Tracing:
    """A debugger, as far as needed here."""

    def __init__(self, stdin: TerminalStream) -> None:
        self.stdin = stdin

    def trace_dispatch(self, *_: object) -> None: ...


def test_a_child_of_a_rank_is_not_debugged_at_the_terminal_of_its_parent() -> None:
    ours, theirs = socket.socketpair()
    before, stream = sys.gettrace(), TerminalStream(ours)
    try:
        sys.settrace(Tracing(stream).trace_dispatch)
        debugger.untrace()
        assert sys.gettrace() is None
        sys.settrace(lambda *_: None)  # the trace function of other code
        debugger.untrace()
        assert sys.gettrace() is not None
    finally:
        sys.settrace(before)
        stream.close()
        theirs.close()


def test_a_thread_that_was_stepped_through_to_its_end_is_through() -> None:
    notes: list[str] = []
    ours, theirs = socket.socketpair()
    try:
        terminal.connect(lambda message, _: notes.append(message["is"]))
        assert terminal.acquire_turn()
        thread = threading.Thread(target=lambda: terminal.begin(None, TerminalStream(ours), waits=True))
        thread.start()
        thread.join()
        terminal.end_stale_session()
        assert notes == ["released"]
        assert terminal.acquire_turn(0)
    finally:
        terminal.connect(None)
        theirs.close()
