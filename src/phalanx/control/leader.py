"""The control plane on node 0: admits members, receives their messages, notices when one is gone.

    leader = Leader(token, own_info, expected=2, run="train-1102", events=events)
    await leader.open(sockets)
    await leader.wait_for_members(timeout=300)
    leader.send(1, message)
    await leader.close()

Messages of members go to `events`, one call per message, in the order of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import WebSocketError, WSMsgType, web

from phalanx.control import channel, messages
from phalanx.control.admission import Admission, Applicant, describe
from phalanx.control.connection_gate import AT_ONCE, MOST, PATIENCE, ConnectionGate, GateLimits, make_room
from phalanx.control.joined_member import JoinedMember
from phalanx.control.messages import Message, NodeInfo, Ping, Refusal, Waiting, Welcome
from phalanx.control.rendezvous_status import MemberNames, RendezvousStatus
from phalanx.control.roster import Roster
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

logger = logging.getLogger(__name__)

PATH = "/phalanx/worker"
SERVER = "phalanx"  # in the Server header: tells a member that it has reached a leader
QUIET = 3.0  # seconds without a message from a member after which a note is printed
_BACKLOG = 4096  # connections that the kernel queues
_INVALID = "it sent an invalid message"
_CLOSING = 5.0  # seconds for members to disconnect at the end


class LeaderEvents(Protocol):
    """What a leader reports."""

    def heard(self, member: int, message: messages.FromMember) -> None:
        """A member has sent a message."""

    def joined(self, member: int) -> None:
        """A member has joined after the start of the run."""

    def lost(self, member: int, why: str, *, silent: bool) -> None:
        """A member is lost. `silent`: it may still run, but cannot be reached."""

    def note(self, text: str) -> None:
        """Print a line."""

    def waiting(self, text: str) -> None:
        """Show the progress of the rendezvous."""

    def gathering(self, here: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None:
        """Report who has joined and who is missing, repeatedly until all have joined."""


@dataclass(frozen=True)
class Timing:
    """Intervals and timeouts, in seconds."""

    ping: float = 1.0
    node_timeout: float = 15.0
    patience: float = PATIENCE  # for a caller to prove itself
    last_call: float = 0.0  # for others to join once there are enough

    def rest(self, members: int) -> float:
        """Return the seconds between two pings: more for thousands of members."""
        return min(max(self.ping, members / 1000), self.node_timeout / 3)

    def quiet(self, members: int) -> float:
        """Return the seconds of silence after which a note is printed."""
        return min(max(QUIET, 2 * self.rest(members)), self.node_timeout / 2)


class Leader:
    """The leader of a run."""

    def __init__(
        self,
        token: Token,
        arrival: NodeInfo,
        *,
        expected: int,
        run: str,
        events: LeaderEvents,
        promised: tuple[int, ...] = (),
        timing: Timing | None = None,
        names: MemberNames | None = None,
        least: int = 0,
        spares: int = 0,
    ) -> None:
        self.roster = Roster(expected, promised, least, spares)
        self._names = names or MemberNames()
        own = self.roster.admit(arrival)
        if isinstance(own, Refusal):
            raise JoinError(f"node 0 itself cannot take part: {describe(own)}")
        self.id = own
        self.guests: dict[int, JoinedMember] = {}
        self._hosts = {own: arrival.host}  # of all members that ever joined
        self.doors: dict[int, tuple[str, int]] = {}  # of the same: where each would listen if it had to lead
        self._arrival = arrival
        self._run = run
        self._events = events
        self._timing = timing or Timing()
        self._admission = Admission(token, self.roster, events.note, timeout=self._timing.patience)
        self._status = RendezvousStatus(self.roster, self._names)
        self._begun = self.roster.complete  # from here on a member that goes is lost
        self._latest = time.monotonic()  # when the latest member joined
        self._gathers = False
        self._hopeless: JoinError | None = None
        self._changed = asyncio.Event()  # enough have joined, or one cannot
        self._closed = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._gate: ConnectionGate | None = None
        self._pinger: asyncio.Task[None] | None = None
        self._closing = False
        self._ended = False  # the end of the run was sent

    # -- rendezvous

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on the sockets. From here on members can join."""
        loop = asyncio.get_running_loop()
        make_room(self.roster.expected)
        # All members are unauthenticated at first, and may come at the same time.
        most = MOST + self.roster.expected
        self._gate = ConnectionGate(self._visit, GateLimits(most=most, patience=self._timing.patience))
        for sock in sockets:
            self._status.addresses.append(_spell(sock.getsockname()))
            # asyncio accepts as many connections at a time as the backlog says, before the gate can close one.
            self._servers.append(await loop.create_server(self._gate, sock=sock, backlog=AT_ONCE))
            sock.listen(_BACKLOG)
        self._pinger = loop.create_task(self._ping_members())

    async def wait_for_members(self, timeout: float) -> None:
        """Wait until all members, or enough of them, have joined. Raises JoinError: who is missing, and why."""
        start = time.monotonic()
        sent = 0.0
        while not self._begun:
            now = time.monotonic()
            waited, left = now - start, self._latest + self._timing.last_call - now
            if self.roster.enough and left <= 0:
                self._begun = True
                break
            if self._hopeless is not None:
                raise self._hopeless
            if waited >= timeout:
                raise self._status.timed_out(timeout, self._admission.rejected)
            self._events.waiting(self._status.progress(waited))
            self._report_progress(self._status.progress(waited))
            if waited - sent > 5 and len(self.guests) <= 256:
                sent = waited
                self.broadcast(Waiting(text=self._status.progress(waited)))
            self._changed.clear()
            rest = min(1.0, timeout - waited + 0.01, left + 0.01 if self.roster.enough else 1.0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), rest)
        self._report_progress("")

    def _report_progress(self, text: str) -> None:
        joined, missing = self._status.joined_and_missing()
        self._events.gathering(joined, missing, self.roster.expected, text)

    async def gather(self, members: Collection[int], timeout: float) -> None:
        """Wait for members of a lost leader to join this one, at most `timeout` seconds. Then the run continues."""
        self._gathers = True
        until = time.monotonic() + timeout
        while not set(members) <= self.guests.keys() and (left := until - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        self._begun = True

    async def _visit(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != PATH or request.method != "GET":
            return web.Response(status=404, text="phalanx control port\n", headers={"Server": SERVER})
        ws = web.WebSocketResponse(max_msg_size=messages.FRAME_LIMIT, compress=False, timeout=_CLOSING)
        ws.headers["Server"] = SERVER
        if not ws.can_prepare(request):
            return web.Response(status=400, text="phalanx control port\n", headers={"Server": SERVER})
        await ws.prepare(request)
        guest = None
        with contextlib.suppress(ConnectionError, msgspec.MsgspecError, asyncio.TimeoutError):
            guest = await self._receive(request, ws)
        if guest is not None:
            await self._converse(guest, ws)
        with contextlib.suppress(ConnectionError):
            await ws.close()
        return ws

    async def _receive(self, request: web.BaseRequest, ws: web.WebSocketResponse) -> JoinedMember | None:
        """Authenticate a caller and admit it. Returns None if it was rejected."""
        applicant = await self._admission.challenge(request, ws)
        if applicant is None:
            return None
        if self._gate is not None:
            self._gate.trust(request)
        channel.tune(applicant.transport.get_extra_info("socket"))
        answer, guest = self._admit(applicant)
        try:
            await self._admission.answer(ws, applicant, answer)
        except BaseException:  # cancelled, too: the member is registered already
            if guest is not None:
                self._departed(guest, "its connection broke during the handshake")
            raise
        if guest is not None:
            self._came(guest)
        return guest

    def _admit(self, applicant: Applicant) -> tuple[Message, JoinedMember | None]:
        fatal = self._names.managed and not self._begun
        admitted = self._admission.admit(applicant, fatal=fatal)
        if isinstance(admitted, Refusal):
            if fatal and admitted.kind != "words":
                host = messages.node_info.decode(applicant.arrival).host
                self._hopeless = JoinError(f"{host} at {applicant.peer} cannot take part: {describe(admitted)}")
                self._changed.set()
            return admitted, None
        id_, info, warnings = admitted
        for text in warnings:
            self._events.note(text)
        self._hosts[id_] = info.host
        self.doors[id_] = (applicant.peer, info.door)
        sealed = self._admission.channel(applicant)
        guest = JoinedMember(
            id_, info, applicant.peer, applicant.own, sealed, applicant.transport, heard=time.monotonic()
        )
        self.guests[id_] = guest
        welcome = Welcome(
            member=id_,
            run=self._run,
            leader=self._arrival.host,
            node_timeout=self._timing.node_timeout,
            quiet=self._timing.quiet(self.roster.expected),
            notes=tuple(warnings),
        )
        return welcome, guest

    def _came(self, guest: JoinedMember) -> None:
        self._latest = time.monotonic()
        if self._begun:
            self._events.joined(guest.id)
        self._begun = self._begun or self.roster.complete
        if self.roster.enough or self._gathers:
            self._changed.set()

    # -- messages

    async def _converse(self, guest: JoinedMember, ws: web.WebSocketResponse) -> None:
        writer = asyncio.get_running_loop().create_task(guest.write(ws))
        why = "its connection closed: its agent was killed, or the machine went down"
        try:
            async for frame in ws:
                if frame.type != WSMsgType.BINARY:
                    broke = frame.type == WSMsgType.ERROR and not isinstance(frame.data, WebSocketError)
                    what = frame.data if frame.type == WSMsgType.ERROR else "a text frame"
                    why = f"its connection broke ({what})" if broke else f"{_INVALID} ({what})"
                    break
                guest.heard = time.monotonic()
                self._hear(guest, messages.from_member.decode(guest.channel.open(frame.data)))
                if guest.gone:
                    break
        except (channel.ForgedFrameError, msgspec.MsgspecError) as error:
            why = f"{_INVALID} ({type(error).__name__})"
        except ConnectionError as error:
            why = f"its connection broke ({error})"
        except Exception as error:  # a bug in a handler must not end the agent
            logger.debug("message of member %s failed", guest.id, exc_info=True)
            why = f"its message could not be processed ({type(error).__name__}: {error})"
        finally:
            if guest.closing:  # the writer closes the connection, within a limit
                with contextlib.suppress(asyncio.CancelledError):
                    await writer
            writer.cancel()
            self._departed(guest, why)

    def _hear(self, guest: JoinedMember, message: messages.FromMember) -> None:
        if isinstance(message, messages.Pong):
            guest.record_pong(message)
            return
        if self.guests.get(guest.id) is not guest:  # another member has its number by now
            return
        if isinstance(message, messages.Leaving):
            if message.text and self._names.managed and not self._begun:
                self._hopeless = JoinError(f"{self.name(guest.id)}: {message.text}")
                self._changed.set()
            # Before the handler runs, which must not wait for this member any more.
            guest.gone = True
            self._departed(guest, "")
        self._events.heard(guest.id, message)

    def _departed(self, guest: JoinedMember, why: str, *, silent: bool = False) -> None:
        """Remove a member. Does nothing if it is removed already."""
        if self.guests.get(guest.id) is not guest:
            return
        del self.guests[guest.id]
        if not self._begun:  # it may join again
            if not self._closing:
                self._events.note(f"{self.name(guest.id)} left before the start")
            self.roster.remove(guest.id)
        elif not guest.gone and not self._closing:
            self._events.lost(guest.id, why, silent=silent)
        if not self.guests:
            self._closed.set()

    def name(self, member: int) -> str:
        """Return the name of a member for messages."""
        return self._names.name(member, self._hosts.get(member, ""))

    def peer_list(self, working: Collection[int]) -> messages.PeerList:
        """Return all members, and where each could be reached if it had to lead."""
        peers = [
            messages.Peer(
                member=id_,
                host=guest.arrival.host[:256],
                address=guest.address[:256],
                port=guest.arrival.door,
                works=id_ in working,
            )
            for id_, guest in sorted(self.guests.items())
            if id_ in self.roster.members  # else it is leaving
        ]
        return messages.PeerList(leader=self.id, peers=tuple(peers))

    @property
    def audible(self) -> int:
        """The number of members that have answered lately, this one included."""
        return 1 + sum(not guest.quiet for guest in self.guests.values())

    def send(self, member: int, message: Message) -> None:
        """Send a message to one member."""
        if member in self.guests:
            self.guests[member].outbox.put_nowait(messages.encode(message))

    def broadcast(self, message: Message) -> None:
        """Send a message to all members."""
        self._ended = self._ended or isinstance(message, messages.EndMessage)
        content = messages.encode(message)
        for guest in self.guests.values():
            guest.outbox.put_nowait(content)

    async def _ping_members(self) -> None:
        """Ping all members, and drop those that are silent for too long."""
        rest = self._timing.rest(self.roster.expected)
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(rest)
            now = time.monotonic()
            late = now - asleep - rest
            self.broadcast(Ping(time=time.time()))
            for guest in list(self.guests.values()):
                if late > 1:  # this process was stopped, or the machine was asleep
                    guest.heard = min(guest.heard + late, now)
                self._check(guest, now - guest.heard)

    def _check(self, guest: JoinedMember, silence: float) -> None:
        limit = self._timing.quiet(self.roster.expected)
        if silence > self._timing.node_timeout:
            why = f"no message from it for {silence:.0f} s (--node-timeout): link or machine is down"
            self._departed(guest, why, silent=True)
            guest.abort()
        elif silence > limit and not guest.quiet:
            guest.quiet = True
            self._events.note(f"{self.name(guest.id)} has not answered for {silence:.0f} s")
        elif silence <= limit and guest.quiet:
            guest.quiet = False
            self._events.note(f"{self.name(guest.id)} answers again")

    # -- the end

    async def close(self) -> None:
        """Send what is queued, then close all connections."""
        self._closing = True
        for server in self._servers:
            server.close()
        self._closed.clear()  # it may be set: all members may have left before
        if self.guests and self._ended:
            # Members disconnect when they have received the end. Do not close first: that would drop what the kernel
            # has not sent yet.
            patience = self._timing.node_timeout if any(guest.quiet for guest in self.guests.values()) else _CLOSING
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), patience)
        for guest in self.guests.values():
            guest.outbox.put_nowait(None)
        if self.guests:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), _CLOSING)
        if self._pinger is not None:
            self._pinger.cancel()
        if self._gate is not None:
            self._gate.close()
            await self._gate.shutdown(0.5)


def _spell(name: tuple[object, ...]) -> str:
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
