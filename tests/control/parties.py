"""Leaders, members and unknown clients for tests: in this process, or in another.

python -m tests.control.parties leader EXPECTED LOST_AFTER | member PORT ID | clients PORT COUNT
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from phalanx.control import messages, tls
from phalanx.control.endpoint import Endpoint
from phalanx.control.leader.leader import Leader
from phalanx.control.leader.liveness import Timing
from phalanx.control.leader.members import MemberNames, Members
from phalanx.control.leader.roster import Roster
from phalanx.control.leader.server import PATH
from phalanx.control.member.member import Member
from phalanx.control.messages import JoinRequest, NodeInfo, Welcome
from phalanx.control.tokens import Token
from tests.kit.cli import PYTHON, Handle, start
from tests.kit.proc import SLOWEST

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOKEN = Token(b"k" * 32, "a test")
OTHER = Token(b"o" * 32, "another test")
FAST = Timing(ping=0.1, node_timeout=1.5, patience=0.5)


def arrival(member: int | None = 1, **changes: Any) -> NodeInfo:
    given: dict[str, Any] = {"run": "", "host": f"host{member}", "pid": 100, "slots": 1, "versions": {}, "terms": {}}
    return NodeInfo(**{**given, "member": member, **changes})


async def until(predicate: Callable[[], object], timeout: float = 10 * SLOWEST) -> None:
    end = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < end, f"not in {timeout} s"
        await asyncio.sleep(0.005)


@dataclass
class RecordedEvents:
    """Base class for both sides: records all events."""

    from_members: list[tuple[int, messages.FromMember]] = field(default_factory=list)
    from_leader: list[messages.FromLeader] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    came: list[int] = field(default_factory=list)
    gathered: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def waiting(self, text: str) -> None:
        self.waits.append(text)


class LeaderEvents(RecordedEvents):
    def member_joined(self, member: int) -> None:
        self.came.append(member)

    def rendezvous_progress(self, joined: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None:
        self.gathered.append((joined, missing))

    def message_received(self, member: int, message: messages.FromMember) -> None:
        self.from_members.append((member, message))

    def member_lost(self, member: int, why: str, *, silent: bool) -> None:
        self.gone.append(f"{member}: {why}")


class MemberEvents(RecordedEvents):
    def message_received(self, message: messages.FromLeader) -> None:
        self.from_leader.append(message)

    def leader_lost(self, why: str, *, silent: bool) -> None:
        self.gone.append(why)


@dataclass
class RunningLeader:
    leader: Leader
    members: Members
    events: LeaderEvents
    port: int

    @property
    def ids(self) -> set[int]:
        return set(self.members.connected)


@contextlib.asynccontextmanager
async def leading(
    expected: int = 2,
    *,
    timing: Timing | None = None,
    own: NodeInfo | None = None,
    names: MemberNames | None = None,
    **options: Any,
) -> AsyncIterator[RunningLeader]:
    events, members = LeaderEvents(), Members(Roster(expected, **options), names)
    leader = Leader(TOKEN, own or arrival(0), members, run="test", events=events, timing=timing)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        await leader.open([sock])
        try:
            yield RunningLeader(leader, members, events, sock.getsockname()[1])
        finally:
            await leader.close()


@contextlib.asynccontextmanager
async def joined(
    port: int, member: int | None = 1, *, token: Token = TOKEN, **changes: Any
) -> AsyncIterator[tuple[Member, MemberEvents]]:
    events = MemberEvents()
    one = Member(token, arrival(member, **changes), lambda: [Endpoint("127.0.0.1", port)], events=events)
    try:
        await one.join(10)
        yield one, events
    finally:
        await one.leave()


@dataclass
class RawClient:
    """A client that sends frames directly, so that it can send invalid ones."""

    ws: aiohttp.ClientWebSocketResponse

    def join_request(self, member: int | None = 1, *, words: bytes | None = None) -> bytes:
        words = messages.encode(arrival(member)) if words is None else words
        return messages.encode(JoinRequest(protocol=messages.PROTOCOL, info=words))

    async def answered(self) -> messages.Welcome | messages.ConnectionResumed | messages.Refusal:
        return messages.answer.decode(await self.ws.receive_bytes(timeout=5))

    async def enter(self, member: int | None = 1) -> None:
        await self.ws.send_bytes(self.join_request(member))
        assert isinstance(await self.answered(), Welcome)

    async def send(self, message: messages.Message) -> None:
        await self.ws.send_bytes(messages.encode(message))

    async def closed(self) -> None:
        """Read until the leader closes the connection, and ignore what it sends."""
        async with asyncio.timeout(5 * SLOWEST):
            while (await self.ws.receive()).type == aiohttp.WSMsgType.BINARY:
                pass


@contextlib.asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            f"https://127.0.0.1:{port}{PATH}",
            ssl=tls.client_context(TOKEN),
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            autoping=False,
        ) as ws,
    ):
        yield RawClient(ws)


# -- in a separate process


def actor(*words: str) -> Handle:
    return start(words=(*PYTHON, "-m", "tests.control.parties", *words), env={"PYTHONPATH": ROOT}, cwd=ROOT)


class _PrintEvents:
    """Prints the events that it receives."""

    def note(self, text: str) -> None:
        print("note", text)

    def waiting(self, text: str) -> None: ...


class _PrintLeaderEvents(_PrintEvents):
    def member_joined(self, member: int) -> None: ...
    def rendezvous_progress(
        self, joined: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str
    ) -> None: ...

    def message_received(self, member: int, message: messages.FromMember) -> None:
        print("received", member, type(message).__name__)

    def member_lost(self, member: int, why: str, *, silent: bool) -> None:
        print("lost", member, why)


class _PrintMemberEvents(_PrintEvents):
    def message_received(self, message: messages.FromLeader) -> None:
        print("received", type(message).__name__)

    def leader_lost(self, why: str, *, silent: bool) -> None:
        print("lost", why)


async def _lead(expected: str, node_timeout: str) -> None:
    timing = Timing(ping=0.1, node_timeout=float(node_timeout))
    members = Members(Roster(int(expected)))
    leader = Leader(TOKEN, arrival(0), members, run="test", events=_PrintLeaderEvents(), timing=timing)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        await leader.open([sock])
        print("port", sock.getsockname()[1], "files", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        await leader.wait_for_members(60)
        print("complete")
        await asyncio.Event().wait()


async def _follow(port: str, member: str) -> None:
    one = Member(TOKEN, arrival(int(member)), lambda: [Endpoint("127.0.0.1", int(port))], events=_PrintMemberEvents())
    await one.join(30)
    print("joined")
    await asyncio.Event().wait()


async def _connect_clients(port: str, count: str) -> None:
    callers = []
    for _ in range(int(count)):
        caller = socket.socket()
        caller.bind(("127.0.0.2", 0))  # another host than the member's
        caller.settimeout(10)
        caller.connect(("127.0.0.1", int(port)))
        callers.append(caller)
    print("called")
    await asyncio.Event().wait()


if __name__ == "__main__":
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = hard if sys.argv[1] == "clients" else 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    asyncio.run({"leader": _lead, "member": _follow, "clients": _connect_clients}[sys.argv[1]](*sys.argv[2:]))


def port_of(job: Handle) -> int:
    ready = re.compile(r"port (\d+) files \d+\n")
    job.wait_for(ready)
    return int(ready.findall(job.out)[0])
