"""The control plane on node 0: admits members, receives their messages, notices when one is gone.

    members = Members(Roster(expected=2))
    leader = Leader(token, own_info, members, run="train-1102", events=events)
    await leader.open(sockets)
    await leader.wait_for_members(timeout=300)
    members.send(1, message)
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
from typing import Protocol

import msgspec
from aiohttp import WebSocketError, WSMsgType, web

from phalanx.control import messages, tls
from phalanx.control.endpoint import STEADILY, Endpoint, probe
from phalanx.control.leader.admission import Admission, Applicant, describe
from phalanx.control.leader.liveness import LivenessMonitor, Timing
from phalanx.control.leader.members import JoinedMember, Members
from phalanx.control.leader.rendezvous import Rendezvous
from phalanx.control.leader.server import CLOSE_TIMEOUT, ControlServer
from phalanx.control.messages import (
    ConnectionResumed,
    JoinRequest,
    Message,
    NodeInfo,
    Refusal,
    ResumeRequest,
    Waiting,
    Welcome,
)
from phalanx.control.outbox import LimitExceededError
from phalanx.control.refusals import FIXES
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

logger = logging.getLogger(__name__)

_INVALID = "it sent an invalid message"
_RESUME_CHECK = 0.05  # seconds between two checks whether a member has connected again
_MOST_INFORMED = 256  # members to which the progress of the rendezvous is sent


class LeaderEvents(Protocol):
    """What a leader reports."""

    def message_received(self, member: int, message: messages.FromMember) -> None:
        """Handle a message of a member."""

    def member_joined(self, member: int) -> None:
        """Handle a member that has joined after the start of the run."""

    def member_lost(self, member: int, why: str, *, silent: bool) -> None:
        """Handle the loss of a member. `silent`: it may still run, but cannot be reached."""

    def note(self, text: str) -> None:
        """Print a line."""

    def waiting(self, text: str) -> None:
        """Show the progress of the rendezvous."""

    def rendezvous_progress(self, joined: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None:
        """Report who has joined and who is missing, repeatedly until all have joined."""


class Leader:
    """The leader of a run."""

    def __init__(
        self,
        token: Token,
        info: NodeInfo,
        members: Members,
        *,
        run: str,
        events: LeaderEvents,
        timing: Timing | None = None,
    ) -> None:
        own = members.admit_leader(info)
        if isinstance(own, Refusal):
            raise JoinError(f"node 0 itself cannot take part: {describe(own)}")
        timing = timing or Timing()
        self.id = own
        self.members = members
        self._info = info
        self._run = run
        self._events = events
        self._timing = timing
        self._admission = Admission(token, members.roster, events.note, timeout=timing.patience)
        self._rendezvous = Rendezvous(members, last_call=timing.last_call)
        self._token = token
        self._server = ControlServer(
            self._serve,
            fingerprint=token.fingerprint if token.key else "",
            other_token=self._admission.other_token,
            members=members.roster.expected,
            patience=timing.patience,
        )
        self._monitor = LivenessMonitor(members, timing, note=events.note, lost=self._silent)
        self._resuming: set[asyncio.Task[None]] = set()  # wait for members whose connection broke
        self._all_disconnected = asyncio.Event()
        self._closing = False

    # -- rendezvous

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on the sockets. From here on members can join."""
        self._rendezvous.status.addresses += [_spell(sock.getsockname()) for sock in sockets]
        self._server.open(sockets, tls.server_context(self._token))
        self._monitor.start()

    async def wait_for_members(self, timeout: float) -> None:
        """Wait until all members, or enough of them, have joined. Raises JoinError, which names the missing ones with
        the reason.
        """
        sent = 0.0

        def progress(text: str, waited: float) -> None:
            nonlocal sent
            self._events.waiting(text)
            self._report_progress(text)
            if waited - sent > 5 and len(self.members.connected) <= _MOST_INFORMED:
                sent = waited
                self.members.broadcast(Waiting(text=text))

        await self._rendezvous.wait(timeout, self._admission.rejected, progress)
        self._report_progress("")

    def _report_progress(self, text: str) -> None:
        joined, missing = self._rendezvous.status.joined_and_missing()
        self._events.rendezvous_progress(joined, missing, self.members.roster.expected, text)

    async def wait_for_survivors(self, members: Collection[int], timeout: float) -> None:
        """Wait for members of a lost leader to join this one, at most `timeout` seconds. Then the run continues."""
        await self._rendezvous.wait_for_survivors(members, timeout)

    # -- connections

    async def _serve(self, request: web.BaseRequest, ws: web.WebSocketResponse) -> None:
        member = None
        with contextlib.suppress(ConnectionError, msgspec.MsgspecError, asyncio.TimeoutError):
            member = await self._authenticate(request, ws)
        if member is not None:
            await self._receive(member, ws)

    async def _authenticate(self, request: web.BaseRequest, ws: web.WebSocketResponse) -> JoinedMember | None:
        """Admit a caller, or let a member continue whose connection broke. Returns None if it was rejected."""
        applicant = await self._admission.request(request, ws)
        if applicant is None:
            return None
        self._server.trust(request)
        tls.tune(applicant.transport.get_extra_info("socket"))
        resumes = isinstance(applicant.request, ResumeRequest)
        answer, member = self._answer(applicant)
        try:
            await ws.send_bytes(messages.encode(answer))
        except BaseException:  # also when cancelled: the member is already registered
            if member is not None:
                self._broken(member, applicant.transport, "its connection broke during the handshake")
            raise
        if member is not None and not resumes and self._rendezvous.member_joined():
            self._events.member_joined(member.id)
        return member

    def _answer(self, applicant: Applicant) -> tuple[Message, JoinedMember | None]:
        if isinstance(applicant.request, ResumeRequest):
            return self._resume(applicant, applicant.request)
        return self._admit(applicant, applicant.request)

    def _resume(self, applicant: Applicant, request: ResumeRequest) -> tuple[Message, JoinedMember | None]:
        member = self.members.find(request.member, request.session)
        if member is None or self._closing or not member.resume(applicant.transport, request.received):
            return Refusal(kind="gone", leader="the membership has ended"), None
        self._events.note(f"{self.members.name(member.id)} has connected again: its connection had broken")
        return ConnectionResumed(received=member.outbox.received), member

    def _admit(self, applicant: Applicant, join: JoinRequest) -> tuple[Message, JoinedMember | None]:
        fatal = self.members.names.managed and not self._rendezvous.begun
        admitted = self._admission.admit(applicant, join, fatal=fatal)
        if isinstance(admitted, Refusal):
            if fatal and admitted.kind != "words" and join.protocol == messages.PROTOCOL:
                host = messages.node_info.decode(join.info).host
                what = f"{host} at {applicant.peer} cannot take part: {describe(admitted)}"
                error = JoinError(what, fix=FIXES.get(admitted.kind, ""))
                self._rendezvous.fail(error)
            return admitted, None
        id_, info, warnings = admitted
        for text in warnings:
            self._events.note(text)
        member = JoinedMember(
            id_, info, applicant.peer, applicant.own, applicant.transport, last_message=time.monotonic()
        )
        self.members.add(member)
        welcome = Welcome(
            member=id_,
            run=self._run,
            leader=self._info.host,
            node_timeout=self._timing.node_timeout,
            quiet=self._timing.quiet(self.members.roster.expected),
            session=member.session,
            resume=self._timing.resume,
            notes=tuple(warnings),
        )
        return welcome, member

    async def _receive(self, member: JoinedMember, ws: web.WebSocketResponse) -> None:
        """Receive messages until the connection ends."""
        transport = member.transport
        writer = member.writer = asyncio.get_running_loop().create_task(member.write(ws))
        broken = "its connection closed: its agent was killed, or the machine went down"
        invalid = ""
        try:
            async for frame in ws:
                if member.transport is not transport:
                    break
                if frame.type != WSMsgType.BINARY:
                    broke = frame.type == WSMsgType.ERROR and not isinstance(frame.data, WebSocketError)
                    what = frame.data if frame.type == WSMsgType.ERROR else "a text frame"
                    broken, invalid = (f"its connection broke ({what})", "") if broke else ("", f"{_INVALID} ({what})")
                    break
                member.last_message = time.monotonic()
                member.outbox.received += 1
                self._dispatch(member, messages.from_member.decode(frame.data))
                if member.left:
                    break
        except msgspec.MsgspecError as error:
            invalid = f"{_INVALID} ({type(error).__name__})"
        except LimitExceededError as error:
            member.drop(str(error))
        except ConnectionError as error:
            broken = f"its connection broke ({error})"
        except Exception as error:  # a bug in a handler must not end the agent
            logger.debug("message of member %s failed", member.id, exc_info=True)
            invalid = f"its message could not be processed ({type(error).__name__}: {error})"
        finally:
            if member.closing and member.transport is transport:  # the writer closes the connection, within a limit
                with contextlib.suppress(asyncio.CancelledError):
                    await writer
            writer.cancel()
            if invalid or member.dropped:
                self._disconnected(member, member.dropped or invalid)
            else:
                self._broken(member, transport, broken)

    def _broken(self, member: JoinedMember, transport: asyncio.BaseTransport, why: str) -> None:
        """Handle a connection that has ended. The member may connect again, if it has not left."""
        if member.transport is not transport or member.broken or not self.members.is_current(member):
            return
        if member.left or member.closing or self._closing or not self._rendezvous.begun:
            self._disconnected(member, why)
            return
        member.broken = True
        waiting = asyncio.get_running_loop().create_task(self._wait_for_resume(member, why))
        self._resuming.add(waiting)
        waiting.add_done_callback(self._resuming.discard)

    async def _wait_for_resume(self, member: JoinedMember, why: str) -> None:
        """Remove a member that does not connect again: at once, if its agent is known to have ended."""
        until = time.monotonic() + self._timing.resume
        where = Endpoint(*self.members.failover_endpoints.get(member.id, ("", 0)))
        ended = await probe(where, steadily=min(STEADILY, self._timing.resume)) == "closed"
        while member.broken and time.monotonic() < until and not ended:
            await asyncio.sleep(_RESUME_CHECK)
        if member.broken:
            if ended:
                self.members.ended(member.id)
            self._disconnected(member, why)

    def _dispatch(self, member: JoinedMember, message: messages.FromMember) -> None:
        if isinstance(message, messages.Pong):
            member.record_pong(message)
            return
        if not self.members.is_current(member):  # another member now has its number
            return
        if isinstance(message, messages.Leaving):
            if message.text and self.members.names.managed and not self._rendezvous.begun:
                self._rendezvous.fail(JoinError(f"{self.members.name(member.id)}: {message.text}"))
            # Before the handler runs, which must not wait for this member any more.
            member.left = True
            self._disconnected(member, "")
        self._events.message_received(member.id, message)

    def _silent(self, member: JoinedMember, why: str) -> None:
        self._disconnected(member, why, silent=True)

    def _disconnected(self, member: JoinedMember, why: str, *, silent: bool = False) -> None:
        """Remove a member. Does nothing if it is already removed."""
        if not self.members.disconnect(member):
            return
        if not self._rendezvous.begun:  # it may join again
            if not self._closing:
                self._events.note(f"{self.members.name(member.id)} left before the start")
            self.members.roster.remove(member.id)
        elif not member.left and not self._closing:
            self._events.member_lost(member.id, why, silent=silent)
        if not self.members.connected:
            self._all_disconnected.set()

    # -- the end

    async def close(self) -> None:
        """Send what is queued, then close all connections."""
        self._closing = True
        self._server.stop_listening()
        self._all_disconnected.clear()  # it may be set: all members may have left before
        connected = self.members.connected
        for waiting in self._resuming:
            waiting.cancel()
        for member in [member for member in connected.values() if member.broken]:
            self._disconnected(member, "its connection broke")
        if connected and self.members.end_sent:
            # Members disconnect when they have received the end. Do not close first: that would drop data that the
            # kernel has not sent yet.
            unresponsive = any(member.unresponsive for member in connected.values())
            await self._wait_until_disconnected(self._timing.node_timeout if unresponsive else CLOSE_TIMEOUT)
        for member in connected.values():
            member.outbox.end()
        if connected:
            await self._wait_until_disconnected(CLOSE_TIMEOUT)
        for member in list(connected.values()):  # those that do not read the remaining messages
            member.abort()
        self._monitor.close()
        await self._server.close()

    async def _wait_until_disconnected(self, timeout: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_disconnected.wait(), timeout)


def _spell(name: tuple[object, ...]) -> str:
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
