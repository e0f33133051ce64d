"""Admission of members: reads the request of a caller and compares its node with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import WSMsgType, web

from phalanx.contract.visible import visible_line
from phalanx.control import messages
from phalanx.control.leader.roster import Roster
from phalanx.control.leader.server import host
from phalanx.control.messages import JoinRequest, NodeInfo, Refusal, ResumeRequest
from phalanx.control.refusals import FIXES, Rejection
from phalanx.control.tokens import Token

_MOST_REJECTED = 64
_REMEDY = "copy our token file there, or set PHALANX_TOKEN to the same value on both"


@dataclass(frozen=True)
class Applicant:
    """A caller that has the token, as TLS has proved, and requests to join, or to continue after a broken
    connection.
    """

    peer: str  # its address
    own: str  # the local address that it used
    request: JoinRequest | ResumeRequest
    transport: asyncio.BaseTransport


class Admission:
    """Decides which callers may join.

    `note`: prints a line for the user. `rejected`: rejected callers, with the reason.
    """

    def __init__(self, token: Token, roster: Roster, note: Callable[[str], None], *, timeout: float) -> None:
        self.rejected: dict[str, Rejection] = {}
        self._token = token
        self._roster = roster
        self._note = note
        self._timeout = timeout

    async def request(self, request: web.BaseRequest, ws: web.WebSocketResponse) -> Applicant | None:
        """Return the request of a caller. None: it is not a valid request."""
        frame = await ws.receive(self._timeout)
        if frame.type != WSMsgType.BINARY or len(frame.data) > messages.JOIN_REQUEST_LIMIT:
            return None
        asked = messages.request.decode(frame.data)
        transport = request.transport
        if transport is None:
            return None
        return Applicant(host(transport, "peername"), host(transport, "sockname"), asked, transport)

    def other_token(self, peer: str) -> None:
        """Record a caller that has another token."""
        self.reject(peer, Rejection(f"a different token than ours, which is from {self._token}: {_REMEDY}", _REMEDY))

    def admit(
        self, applicant: Applicant, join: JoinRequest, *, fatal: bool
    ) -> tuple[int, NodeInfo, list[str]] | Refusal:
        """Give the applicant a number in the roster. Return the number with warnings, or the reason why it cannot take
        part.

        `fatal`: a rejection ends the run, so it is not printed here.
        """
        if join.protocol != messages.PROTOCOL:
            mine, theirs = f"protocol {messages.PROTOCOL}", f"protocol {join.protocol}"
            refusal = Refusal(kind="version", leader=mine, member=theirs)
            self.reject(applicant.peer, _rejection(refusal))
            return refusal
        try:
            info = messages.node_info.decode(join.info)
        except msgspec.MsgspecError as error:  # it has the token, so it gets an answer
            refusal = Refusal(kind="words", leader="another message format", member=f"an unreadable message: {error}")
            self.reject(applicant.peer, _rejection(refusal))
            return refusal
        info = _without_controls(info)
        warnings = self._roster.warnings(info)
        given = self._roster.admit(info)
        if isinstance(given, Refusal):
            self.reject(f"{info.host} at {applicant.peer}", _rejection(given), quiet=fatal)
            return given
        return given, info, warnings

    def reject(self, who: str, rejection: Rejection, *, quiet: bool = False) -> None:
        """Record a rejected attempt, and print it the first time."""
        if self.rejected.get(who) != rejection and len(self.rejected) < _MOST_REJECTED:
            if not quiet:
                self._note(f"{who} was rejected: {rejection.why}")
            self.rejected[who] = rejection


def _rejection(refusal: Refusal) -> Rejection:
    return Rejection(describe(refusal), FIXES.get(refusal.kind, ""))


def _without_controls(info: NodeInfo) -> NodeInfo:
    """Return the same without control characters: the names are printed and recorded in many places."""
    versions = {visible_line(name): visible_line(version) for name, version in info.versions.items()}
    return msgspec.structs.replace(info, host=visible_line(info.host), run=visible_line(info.run), versions=versions)


def describe(refusal: Refusal) -> str:
    """Return why a node was rejected, for the terminal of the leader."""
    match refusal.kind:
        case "trouble":
            return refusal.member
        case "run":
            return f"it belongs to the run {refusal.member}, this is {refusal.leader}"
        case "taken":
            return f"{refusal.member} is taken by {refusal.leader}"
        case "devices":
            return f"it has {refusal.member}, but {refusal.leader} were expected"
        case _:
            return f"it has {refusal.member}, node 0 has {refusal.leader}"
