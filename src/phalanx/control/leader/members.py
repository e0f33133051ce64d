"""The members of a run, from the leader's perspective: which have joined, which are connected, and how to send to
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from phalanx.contract.ranks import number_ranges
from phalanx.control import messages
from phalanx.control.leader.roster import Roster
from phalanx.control.messages import Message, NodeInfo
from phalanx.control.outbox import LimitExceededError, Outbox

SUCCESSORS = 64  # members that could become leader: if all of them are lost with the leader, the run ends


@dataclass(frozen=True)
class MemberNames:
    """The names of members in messages."""

    noun: str = "node"  # or "task": a task of a scheduler, which is one rank
    hosts: tuple[str, ...] = ()  # by number, if known in advance
    managed: bool = False  # all members were started together: one that cannot take part does not try again

    def name(self, member: int, host: str = "") -> str:
        """Return the name of a member, with its host if that is known."""
        host = host or (self.hosts[member] if member < len(self.hosts) else "")
        return f"{self.noun} {member} ({host})" if host else f"{self.noun} {member}"

    def listed(self, members: Sequence[int], most: int) -> str:
        """Return at most `most` members in one line."""
        more = f" and {len(members) - most} more" if len(members) > most else ""
        if self.hosts:
            return ", ".join(map(self.name, members[:most])) + more
        return f"{self.noun}{'s' if len(members) > 1 else ''} {', '.join(map(str, members[:most]))}{more}"


@dataclass
class MemberClock:
    """The clock of a member, compared with ours by pings."""

    skew: float = 0.0  # its clock minus ours
    round_trip: float = float("inf")  # of the fastest ping, which measures the skew best

    def compare(self, pong: messages.Pong) -> None:
        """Measure the skew from an answered ping."""
        now = time.time()
        round_trip = now - pong.ping
        if 0 <= round_trip < self.round_trip:
            self.round_trip, self.skew = round_trip, pong.time - (pong.ping + now) / 2


@dataclass
class JoinedMember:
    """A member that has joined. It may continue with another connection if the first one broke."""

    id: int
    info: NodeInfo
    address: str  # of the member, as seen from the leader
    leader_address: str  # the address that the member used
    transport: asyncio.BaseTransport  # of the current connection
    session: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)  # see messages.Welcome
    outbox: Outbox = field(default_factory=Outbox)
    writer: asyncio.Task[None] | None = None  # sends queued messages, through the current connection
    last_message: float = 0.0  # monotonic time
    unresponsive: bool = False  # it has not answered for a while
    left: bool = False  # it has announced that it leaves
    closing: bool = False  # the leader has closed the connection
    dropped: str = ""  # why the leader has dropped it
    broken: bool = False  # its connection is lost, and it may connect again
    clock: MemberClock = field(default_factory=MemberClock)

    async def write(self, ws: web.WebSocketResponse) -> None:
        """Send queued messages until the outbox ends, then close the connection."""
        with contextlib.suppress(ConnectionError):
            await self.outbox.send_all(ws.send_bytes)
            self.closing = True
            await ws.close()

    def send(self, content: bytes) -> None:
        """Queue a message. A member that does not read is dropped."""
        if not self.dropped:
            try:
                self.outbox.put(content)
            except LimitExceededError as error:
                self.drop(str(error))

    def drop(self, why: str) -> None:
        """Close the connection at once, because the member exceeds a limit."""
        self.dropped = self.dropped or why
        self.outbox.clear()
        self.abort()

    def resume(self, transport: asyncio.BaseTransport, received: int) -> bool:
        """Continue with another connection. Return False if the counts of messages do not fit."""
        if not self.outbox.rewind(received):
            return False
        if self.writer is not None:
            self.writer.cancel()  # otherwise it could send a message through the old connection
        self.abort()  # the old connection, which may not have noticed yet
        self.transport, self.broken, self.last_message = transport, False, time.monotonic()
        return True

    def record_pong(self, pong: messages.Pong) -> None:
        """Measure the clock skew from an answered ping, and drop the messages that the member has received."""
        self.outbox.acknowledge(pong.received)
        self.clock.compare(pong)

    def abort(self) -> None:
        """Close the connection at once, without sending what is still queued."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()


class Members:
    """The members of a run: those that have joined (`roster`), and the connections to them (`connected`)."""

    def __init__(self, roster: Roster, names: MemberNames | None = None) -> None:
        self.roster = roster
        self.names = names or MemberNames()
        self.connected: dict[int, JoinedMember] = {}
        self.end_sent = False  # all members know that the run is over
        # Per member that ever joined and has not ended: the address at which it would listen if it became leader.
        self.failover_endpoints: dict[int, tuple[str, int]] = {}
        self._hosts: dict[int, str] = {}  # of the same members

    def admit_leader(self, info: NodeInfo) -> int | messages.Refusal:
        """Add this node. Return its number, or the reason why it cannot take part."""
        number = self.roster.admit(info)
        if isinstance(number, int):
            self._hosts[number] = info.host
        return number

    def add(self, member: JoinedMember) -> None:
        """Add a connection."""
        self.connected[member.id] = member
        self._hosts[member.id] = member.info.host
        self.failover_endpoints[member.id] = (member.address, member.info.failover_port)

    def disconnect(self, member: JoinedMember) -> bool:
        """Remove a connection. Return False if it is already removed: another one may have its number."""
        if not self.is_current(member):
            return False
        del self.connected[member.id]
        return True

    def ended(self, number: int) -> None:
        """Note that the agent of a member has ended: its host refuses connections to its endpoint."""
        self.failover_endpoints.pop(number, None)

    def find(self, number: int, session: bytes) -> JoinedMember | None:
        """Return the member that has this secret."""
        member = self.connected.get(number)
        return member if member is not None and hmac.compare_digest(member.session, session) else None

    def is_current(self, member: JoinedMember) -> bool:
        """Return whether this connection currently has the member's number."""
        return self.connected.get(member.id) is member

    def name(self, member: int) -> str:
        """Return the name of a member for messages."""
        return self.names.name(member, self._hosts.get(member, ""))

    def host(self, member: int) -> str:
        """Return the host of a member. Empty if it never joined."""
        return self._hosts.get(member, "")

    def skew(self, member: int) -> float:
        """Return the clock of a member minus ours. 0 if it is not connected."""
        return self.connected[member].clock.skew if member in self.connected else 0.0

    @property
    def responsive(self) -> int:
        """The number of members that have answered recently, including this one."""
        return 1 + sum(not member.unresponsive for member in self.connected.values())

    def send(self, member: int, message: Message) -> None:
        """Send a message to one member."""
        if member in self.connected:
            self.connected[member].send(messages.encode(message))

    def broadcast(self, message: Message) -> None:
        """Send a message to all members."""
        self.end_sent = self.end_sent or isinstance(message, messages.EndMessage)
        content = messages.encode(message)
        for member in list(self.connected.values()):
            member.send(content)

    def ping(self) -> None:
        """Send a ping to all members."""
        now = time.time()
        for member in list(self.connected.values()):
            member.send(messages.encode(messages.Ping(time=now, received=member.outbox.received)))

    def peer_list(self, leader: int, working: Collection[int]) -> messages.PeerList:
        """Return all members, and the addresses at which the first of them could be reached as leader."""
        peers = sorted(id_ for id_ in self.connected if id_ in self.roster.members)  # the others are leaving
        return messages.PeerList(
            leader=leader,
            successors=tuple(self._peer(id_) for id_ in peers[:SUCCESSORS]),
            working=number_ranges.encode(id_ for id_ in peers if id_ in working),
            spares=number_ranges.encode(id_ for id_ in peers if id_ not in working),
        )

    def _peer(self, id_: int) -> messages.Peer:
        member = self.connected[id_]
        return messages.Peer(
            member=id_,
            host=member.info.host[:256],
            address=member.address[:256],
            port=member.info.failover_port,
        )
