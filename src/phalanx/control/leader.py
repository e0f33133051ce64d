"""Node 0's side of the control plane: lets members in, hears them, notices when one is gone.

    leader = Leader(token, own_arrival, expected=2, run="train-1102", ears=ears)
    await leader.open(sockets)
    await leader.roll_call(timeout=300)
    leader.send(1, message)
    await leader.close()

What members say goes to `ears`, one call a message, in the order in which it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from aiohttp import WebSocketError, WSMsgType, web

from phalanx.control import channel, messages
from phalanx.control.channel import Channel, Nonces
from phalanx.control.connection_gate import AT_ONCE, MOST, PATIENCE, ConnectionGate, GateLimits, make_room
from phalanx.control.messages import (
    Challenge,
    JoinAnswer,
    JoinRequest,
    Message,
    NodeInfo,
    Ping,
    Refusal,
    Waiting,
    Welcome,
)
from phalanx.control.roster import Roster
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

PATH = "/phalanx/worker"
SERVER = "phalanx"  # in the Server header: how a member knows that it has reached one
QUIET = 3.0  # seconds without a word from a member, after which it is said
_BACKLOG = 4096  # connections that the kernel holds for us
_REMEDY = "copy our token file there, or set PHALANX_TOKEN to the same value on both"
_NONSENSE = "it sent what is not a message of phalanx"
_CLOSING = 5.0  # seconds that members have to go, once everything is over


class LeaderEvents(Protocol):
    def heard(self, member: int, message: messages.FromMember) -> None: ...
    def joined(self, member: int) -> None:
        """One that came when the run had begun."""

    def lost(self, member: int, why: str, *, silent: bool) -> None:
        """`silent`: nobody knows whether it still runs, and only cannot be reached."""

    def note(self, text: str) -> None: ...
    def waiting(self, text: str) -> None: ...
    def gathering(self, here: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None:
        """Names of those who are here, and who are not; again and again, until all are."""


@dataclass
class JoinedMember:
    """A member that is in."""

    id: int
    arrival: NodeInfo
    address: str  # its own, as seen from here
    reached: str  # ours, by which it came
    channel: Channel
    transport: asyncio.BaseTransport
    outbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    heard: float = 0.0
    quiet: bool = False
    gone: bool = False  # it has said that it goes
    closing: bool = False  # we have said so
    skew: float = 0.0  # its clock minus ours
    trip: float = float("inf")  # the shortest time of a ping to it and back: that one tells most about its clock


@dataclass(frozen=True)
class Timing:
    ping: float = 1.0
    node_timeout: float = 15.0
    patience: float = PATIENCE  # with strangers
    last_call: float = 0.0  # for others to come, once there are enough

    def rest(self, members: int) -> float:
        """Seconds between two pings. Where there are thousands, one a second to each would be most of what we do."""
        return min(max(self.ping, members / 1000), self.node_timeout / 3)

    def quiet(self, members: int) -> float:
        """Seconds of silence that are worth a word: more than between two pings."""
        return min(max(QUIET, 2 * self.rest(members)), self.node_timeout / 2)


@dataclass(frozen=True)
class Calling:
    """How the roll is called."""

    noun: str = "node"  # or a task of a scheduler, which is one rank
    names: tuple[str, ...] = ()  # of their hosts, by number, where they are known beforehand
    managed: bool = False  # somebody has started all of them: one that cannot take part will not come again

    def name(self, member: int, host: str = "") -> str:
        host = host or (self.names[member] if member < len(self.names) else "")
        return f"{self.noun} {member} ({host})" if host else f"{self.noun} {member}"


class Leader:
    def __init__(
        self,
        token: Token,
        arrival: NodeInfo,
        *,
        expected: int,
        run: str,
        ears: LeaderEvents,
        promised: tuple[int, ...] = (),
        timing: Timing | None = None,
        calling: Calling | None = None,
        least: int = 0,
        spares: int = 0,
    ) -> None:
        self.roster = Roster(expected, promised, least, spares)
        self._calling = calling or Calling()
        own = self.roster.admit(arrival)
        if isinstance(own, Refusal):
            raise JoinError(f"node 0 itself cannot take part: {in_words(own)}")
        self.id = own
        self.guests: dict[int, JoinedMember] = {}
        self._hosts = {own: arrival.host}  # of all who were here at some time
        self.doors: dict[int, tuple[str, int]] = {}  # of the same: where each would listen if it had to lead
        self._token = token
        self._arrival = arrival
        self._run = run
        self._ears = ears
        self._timing = timing or Timing()
        self._begun = self.roster.complete  # from here on one that goes is missed
        self._latest = time.monotonic()  # when somebody came
        self._gathers = False
        self._hopeless: JoinError | None = None
        self._news = asyncio.Event()  # enough are here, or it is certain that somebody will not come
        self._closed = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._door: ConnectionGate | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._addresses: list[str] = []
        self._troubles: dict[str, str] = {}  # who knocked in vain, and why: told when the time is up
        self._closing = False
        self._ended = False  # members have been told to go

    # -- coming in

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Listen; from here on members can come."""
        loop = asyncio.get_running_loop()
        make_room(self.roster.expected)
        # Members are strangers at first, and may all come in the same instant.
        most = MOST + self.roster.expected
        self._door = ConnectionGate(self._visit, GateLimits(most=most, patience=self._timing.patience))
        for sock in sockets:
            self._addresses.append(_spell(sock.getsockname()))
            # asyncio takes as many at a time as the backlog is long, before we can turn a single one away.
            self._servers.append(await loop.create_server(self._door, sock=sock, backlog=AT_ONCE))
            sock.listen(_BACKLOG)
        self._pulse = loop.create_task(self._beat())

    async def roll_call(self, timeout: float) -> None:
        """Until everybody is here, or enough are, and nobody else comes. Raises JoinError: who is missing, and why."""
        start = time.monotonic()
        told = 0.0
        while not self._begun:
            now = time.monotonic()
            waited, left = now - start, self._latest + self._timing.last_call - now
            if self.roster.enough and left <= 0:
                self._begun = True
                break
            if self._hopeless is not None:
                raise self._hopeless
            if waited >= timeout:
                raise self._absent(timeout)
            self._ears.waiting(self._who(waited))
            self._tell_gathering(self._who(waited))
            if waited - told > 5 and len(self.guests) <= 256:
                told = waited
                self.broadcast(Waiting(text=self._who(waited)))
            self._news.clear()
            rest = min(1.0, timeout - waited + 0.01, left + 0.01 if self.roster.enough else 1.0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), rest)
        self._tell_gathering("")

    def _tell_gathering(self, text: str) -> None:
        here = tuple(arrival.host for _, arrival in sorted(self.roster.members.items()))
        missing = tuple(map(self._calling.name, self.roster.missing))
        self._ears.gathering(here, missing, self.roster.expected, text)

    async def gather(self, members: Collection[int], timeout: float) -> None:
        """Until these are here that were another leader's, or the time is up. From then on the run goes on."""
        self._gathers = True
        until = time.monotonic() + timeout
        while not set(members) <= self.guests.keys() and (left := until - time.monotonic()) > 0:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        self._begun = True

    def _who(self, waited: float) -> str:
        here = f"{len(self.roster.members)} of {self.roster.expected} {self._calling.noun}s are here"
        if self.roster.enough:
            return f"{here}, and that is enough: last call for the others"
        return f"{here}, waiting for {self._list(self.roster.missing, 8)} ({waited:.0f} s)"

    def _list(self, members: list[int], most: int) -> str:
        more = f" and {len(members) - most} more" if len(members) > most else ""
        if self._calling.names:
            return ", ".join(map(self._calling.name, members[:most])) + more
        return f"{self._calling.noun}{'s' if len(members) > 1 else ''} {', '.join(map(str, members[:most]))}{more}"

    def _absent(self, timeout: float) -> JoinError:
        missing = self.roster.missing
        present = sorted(self.roster.members.items())[:16]
        here = ", ".join(self._calling.name(id_, arrival.host) for id_, arrival in present)
        details = [f"here: {here}", f"listening on {', '.join(self._addresses)}"]
        details += [f"{who} knocked in vain: {why}" for who, why in list(self._troubles.items())[-16:]]
        if not self._troubles:
            details.append("nobody else has knocked: was it started there, with this address? does a firewall drop it?")
        have = "has" if len(missing) == 1 else "have"
        by_hand = f"start the same command with -i {missing[0]} there; "
        return JoinError(
            f"{self._list(missing, 16)} of {self.roster.expected} {have} not joined in {timeout:.0f} s",
            details=details,
            fix=f"{'' if self._calling.managed else by_hand}--join-timeout waits longer",
        )

    async def _visit(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != PATH or request.method != "GET":
            return web.Response(status=404, text="this is phalanx\n", headers={"Server": SERVER})
        ws = web.WebSocketResponse(max_msg_size=messages.FRAME_LIMIT, compress=False, timeout=_CLOSING)
        ws.headers["Server"] = SERVER
        if not ws.can_prepare(request):
            return web.Response(status=400, text="this is phalanx\n", headers={"Server": SERVER})
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
        """Challenge a stranger. A guest, if it has the token and fits in."""
        nonce = channel.nonce()
        await ws.send_bytes(messages.encode(Challenge(protocol=messages.PROTOCOL, nonce=nonce)))
        frame = await ws.receive(self._timing.patience)
        if frame.type != WSMsgType.BINARY or len(frame.data) > messages.KNOCK_LIMIT:
            return None
        knock = messages.door.decode(frame.data)
        if not isinstance(knock, JoinRequest):
            return None
        transport = request.transport
        if transport is None:
            return None
        peer, own = _host(transport, "peername"), _host(transport, "sockname")
        key, nonces = self._token.key, Nonces(nonce, knock.nonce)
        if not channel.proven(knock.proof, key, channel.MEMBER, nonces, knock.arrival):
            self._turned_away(peer, f"another token than ours, which is from {self._token}: {_REMEDY}")
            content = messages.encode(Refusal(kind="token", leader=self._token.fingerprint if self._token.key else ""))
            await ws.send_bytes(messages.encode(JoinAnswer(content=content, proof=b"")))
            return None
        if self._door is not None:
            self._door.trust(request)
        channel.tune(transport.get_extra_info("socket"))
        answer, guest = self._answer(knock.arrival, peer, own, Channel(key, nonces, leads=True), transport)
        content = messages.encode(answer)
        proof = channel.prove(key, channel.LEADER, nonces, content)
        try:
            await ws.send_bytes(messages.encode(JoinAnswer(content=content, proof=proof)))
        except BaseException:
            if guest is not None:
                self._departed(guest, "its connection broke at the door")
            raise
        if guest is not None:
            self._came(guest)
        return guest

    def _came(self, guest: JoinedMember) -> None:
        self._latest = time.monotonic()
        if self._begun:
            self._ears.joined(guest.id)
        self._begun = self._begun or self.roster.complete
        if self.roster.enough or self._gathers:
            self._news.set()

    def _answer(
        self, words: bytes, peer: str, own: str, sealed: Channel, transport: asyncio.BaseTransport
    ) -> tuple[Message, JoinedMember | None]:
        try:
            arrival = messages.arrival.decode(words)
        except msgspec.MsgspecError as error:  # it has the token, so it is worth an answer
            refusal = Refusal(kind="words", leader="what it can read", member=f"words that it cannot read: {error}")
            self._turned_away(peer, in_words(refusal))
            return refusal, None
        warnings = self.roster.warnings(arrival)
        given = self.roster.admit(arrival)
        if isinstance(given, Refusal):
            hopeless = self._calling.managed and not self._begun
            self._turned_away(f"{arrival.host} at {peer}", in_words(given), told=hopeless)
            if hopeless:
                self._hopeless = JoinError(f"{arrival.host} at {peer} cannot take part: {in_words(given)}")
                self._news.set()
            return given, None
        for text in warnings:
            self._ears.note(text)
        self._hosts[given] = arrival.host
        self.doors[given] = (peer, arrival.door)
        guest = JoinedMember(given, arrival, peer, own, sealed, transport, heard=time.monotonic())
        self.guests[given] = guest
        welcome = Welcome(
            member=given,
            run=self._run,
            leader=self._arrival.host,
            node_timeout=self._timing.node_timeout,
            quiet=self._timing.quiet(self.roster.expected),
            notes=tuple(warnings),
        )
        return welcome, guest

    def _turned_away(self, who: str, why: str, *, told: bool = False) -> None:
        """Said once for each visitor and reason, and again when the time is up."""
        if self._troubles.get(who) != why and len(self._troubles) < 64:
            if not told:
                self._ears.note(f"{who} was not let in: {why}")
            self._troubles[who] = why

    # -- conversation

    async def _converse(self, guest: JoinedMember, ws: web.WebSocketResponse) -> None:
        writer = asyncio.get_running_loop().create_task(self._write(guest, ws))
        why = "its connection closed: its agent was killed, or the machine went down"
        try:
            async for frame in ws:
                if frame.type != WSMsgType.BINARY:
                    broke = frame.type == WSMsgType.ERROR and not isinstance(frame.data, WebSocketError)
                    what = frame.data if frame.type == WSMsgType.ERROR else "a frame of text"
                    why = f"its connection broke ({what})" if broke else f"{_NONSENSE} ({what})"
                    break
                guest.heard = time.monotonic()
                self._hear(guest, messages.from_member.decode(guest.channel.open(frame.data)))
                if guest.gone:
                    break
        except (channel.ForgedFrameError, msgspec.MsgspecError) as error:
            why = f"{_NONSENSE} ({type(error).__name__})"
        except ConnectionError as error:
            why = f"its connection broke ({error})"
        except Exception as error:  # ours, but better told than swallowed
            why = f"what it said could not be followed ({type(error).__name__}: {error})"
        finally:
            if guest.closing:  # the writer is saying goodbye, and has a limit to its time
                with contextlib.suppress(asyncio.CancelledError):
                    await writer
            writer.cancel()
            self._departed(guest, why)

    def _hear(self, guest: JoinedMember, message: messages.FromMember) -> None:
        if isinstance(message, messages.Pong):
            self._timed(guest, message)
            return
        if self.guests.get(guest.id) is not guest:  # it was to leave, and another has its number by now
            return
        if isinstance(message, messages.Leaving):
            if message.text and self._calling.managed and not self._begun:
                self._hopeless = JoinError(f"{self.name(guest.id)}: {message.text}")
                self._news.set()
            # First of all, so that whoever hears of it does not wait for this one any more.
            guest.gone = True
            self._departed(guest, "")
        self._ears.heard(guest.id, message)

    async def _write(self, guest: JoinedMember, ws: web.WebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError):
            while (content := await guest.outbox.get()) is not None:
                await ws.send_bytes(guest.channel.seal(content))
            guest.closing = True
            await ws.close()

    def _departed(self, guest: JoinedMember, why: str, *, silent: bool = False) -> None:
        """It is no longer one of the guests. Nothing, if that is known already."""
        if self.guests.get(guest.id) is not guest:
            return
        del self.guests[guest.id]
        if not self._begun:  # it may come again
            if not self._closing:
                self._ears.note(f"{self.name(guest.id)} has left before the start")
            self.roster.remove(guest.id)
        elif not guest.gone and not self._closing:
            self._ears.lost(guest.id, why, silent=silent)
        if not self.guests:
            self._closed.set()

    def _timed(self, guest: JoinedMember, pong: messages.Pong) -> None:
        now = time.time()
        trip = now - pong.ping
        if 0 <= trip < guest.trip:
            guest.trip, guest.skew = trip, pong.time - (pong.ping + now) / 2

    def name(self, member: int) -> str:
        """For people."""
        return self._calling.name(member, self._hosts.get(member, ""))

    def roll(self, working: Collection[int]) -> messages.PeerList:
        """Who is here, and where each could be reached if it had to lead."""
        peers = [
            messages.Peer(
                member=id_,
                host=guest.arrival.host[:256],
                address=guest.address[:256],
                port=guest.arrival.door,
                works=id_ in working,
            )
            for id_, guest in sorted(self.guests.items())
            if id_ in self.roster.members  # else it is about to leave
        ]
        return messages.PeerList(leader=self.id, peers=tuple(peers))

    @property
    def audible(self) -> int:
        """Members that have given a sign of life lately, and this one."""
        return 1 + sum(not guest.quiet for guest in self.guests.values())

    def send(self, member: int, message: Message) -> None:
        if member in self.guests:
            self.guests[member].outbox.put_nowait(messages.encode(message))

    def broadcast(self, message: Message) -> None:
        self._ended = self._ended or isinstance(message, messages.EndMessage)
        content = messages.encode(message)
        for guest in self.guests.values():
            guest.outbox.put_nowait(content)

    async def _beat(self) -> None:
        """Say that we live, and look who still does."""
        rest = self._timing.rest(self.roster.expected)
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(rest)
            now = time.monotonic()
            late = now - asleep - rest
            self.broadcast(Ping(time=time.time()))
            for guest in list(self.guests.values()):
                if late > 1:  # it was us who did not listen: a stopped process, a machine that slept
                    guest.heard = min(guest.heard + late, now)
                self._look_at(guest, now - guest.heard)

    def _look_at(self, guest: JoinedMember, silence: float) -> None:
        limit = self._timing.quiet(self.roster.expected)
        if silence > self._timing.node_timeout:
            why = f"not a word from it in {silence:.0f} s (--node-timeout): link or machine is down"
            self._departed(guest, why, silent=True)
            if isinstance(guest.transport, asyncio.WriteTransport):
                guest.transport.abort()  # what it has not read yet it never will
        elif silence > limit and not guest.quiet:
            guest.quiet = True
            self._ears.note(f"{self.name(guest.id)} has not answered for {silence:.0f} s")
        elif silence <= limit and guest.quiet:
            guest.quiet = False
            self._ears.note(f"{self.name(guest.id)} answers again")

    # -- the end

    async def close(self) -> None:
        """What was sent last still goes out; those who do not close by themselves are closed."""
        self._closing = True
        for server in self._servers:
            server.close()
        self._closed.clear()  # those who were here before may all have left at some time
        if self.guests and self._ended:
            # They hang up when they have heard the end. Where packets were lost that comes late; to close now would
            # throw away what the kernel has not been able to send yet.
            patience = self._timing.node_timeout if any(guest.quiet for guest in self.guests.values()) else _CLOSING
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), patience)
        for guest in self.guests.values():
            guest.outbox.put_nowait(None)
        if self.guests:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), _CLOSING)
        if self._pulse is not None:
            self._pulse.cancel()
        if self._door is not None:
            self._door.close()
            await self._door.shutdown(0.5)


def in_words(refusal: Refusal) -> str:
    """For the leader's own terminal."""
    match refusal.kind:
        case "trouble":
            return refusal.member
        case "run":
            return f"it belongs to the run {refusal.member}, this is {refusal.leader}"
        case "taken":
            return f"{refusal.member} is taken by {refusal.leader}"
        case "devices":
            return f"it takes {refusal.member}, and was to take {refusal.leader}"
        case _:
            return f"it has {refusal.member}, node 0 has {refusal.leader}"


def _host(transport: asyncio.BaseTransport, end: str) -> str:
    name = transport.get_extra_info(end)
    if not name:
        raise ConnectionResetError
    # An IPv4 caller at a socket of both kinds.
    return str(name[0]).removeprefix("::ffff:")


def _spell(name: tuple[object, ...]) -> str:
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
