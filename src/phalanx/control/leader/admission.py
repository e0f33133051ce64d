"""Who may join: checks the token of a caller and compares its node with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import WSMsgType, web

from phalanx.control import channel, messages
from phalanx.control.channel import Channel, Nonces
from phalanx.control.leader.roster import Roster
from phalanx.control.messages import Challenge, JoinAnswer, JoinRequest, Message, NodeInfo, Refusal
from phalanx.control.tokens import Token

_MOST_REJECTED = 64
_REMEDY = "copy our token file there, or set PHALANX_TOKEN to the same value on both"


@dataclass(frozen=True)
class Applicant:
    """A caller that has proved that it has the token."""

    peer: str  # its address
    own: str  # the address of ours that it used
    nonces: Nonces
    info: bytes  # an encoded NodeInfo
    transport: asyncio.BaseTransport


class Admission:
    """Decides who may join.

    `note`: prints a line for the user. `rejected`: callers that were turned away, and why.
    """

    def __init__(self, token: Token, roster: Roster, note: Callable[[str], None], *, timeout: float) -> None:
        self.rejected: dict[str, str] = {}
        self._token = token
        self._roster = roster
        self._note = note
        self._timeout = timeout

    async def challenge(self, request: web.BaseRequest, ws: web.WebSocketResponse) -> Applicant | None:
        """Have a caller prove that it has the token. Returns None if it has not."""
        nonce = channel.nonce()
        await ws.send_bytes(messages.encode(Challenge(protocol=messages.PROTOCOL, nonce=nonce)))
        frame = await ws.receive(self._timeout)
        if frame.type != WSMsgType.BINARY or len(frame.data) > messages.JOIN_REQUEST_LIMIT:
            return None
        join = messages.handshake.decode(frame.data)
        transport = request.transport
        if not isinstance(join, JoinRequest) or transport is None:
            return None
        peer, own = _host(transport, "peername"), _host(transport, "sockname")
        nonces = Nonces(nonce, join.nonce)
        if not channel.proven(join.proof, self._token.key, channel.MEMBER, nonces, join.info):
            self.reject(peer, f"another token than ours, which is from {self._token}: {_REMEDY}")
            fingerprint = self._token.fingerprint if self._token.key else ""
            content = messages.encode(Refusal(kind="token", leader=fingerprint))
            await ws.send_bytes(messages.encode(JoinAnswer(content=content, proof=b"")))
            return None
        return Applicant(peer, own, nonces, join.info, transport)

    def admit(self, applicant: Applicant, *, fatal: bool) -> tuple[int, NodeInfo, list[str]] | Refusal:
        """Give the applicant a number in the roster. Returns it with warnings, or why the applicant cannot take part.

        `fatal`: a refusal ends the run, so it is not printed here.
        """
        try:
            info = messages.node_info.decode(applicant.info)
        except msgspec.MsgspecError as error:  # it has the token, so it gets an answer
            refusal = Refusal(kind="words", leader="another message format", member=f"an unreadable message: {error}")
            self.reject(applicant.peer, describe(refusal))
            return refusal
        warnings = self._roster.warnings(info)
        given = self._roster.admit(info)
        if isinstance(given, Refusal):
            self.reject(f"{info.host} at {applicant.peer}", describe(given), quiet=fatal)
            return given
        return given, info, warnings

    def channel(self, applicant: Applicant) -> Channel:
        """Return the authenticated channel to the applicant."""
        return Channel(self._token.key, applicant.nonces, leads=True)

    async def answer(self, ws: web.WebSocketResponse, applicant: Applicant, answer: Message) -> None:
        """Send a Welcome or a Refusal, with the proof that we have the token."""
        content = messages.encode(answer)
        proof = channel.prove(self._token.key, channel.LEADER, applicant.nonces, content)
        await ws.send_bytes(messages.encode(JoinAnswer(content=content, proof=proof)))

    def reject(self, who: str, why: str, *, quiet: bool = False) -> None:
        """Remember a rejected attempt, and print it the first time."""
        if self.rejected.get(who) != why and len(self.rejected) < _MOST_REJECTED:
            if not quiet:
                self._note(f"{who} was rejected: {why}")
            self.rejected[who] = why


def describe(refusal: Refusal) -> str:
    """Return why a node was refused, for the terminal of the leader."""
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


def _host(transport: asyncio.BaseTransport, end: str) -> str:
    name = transport.get_extra_info(end)
    if not name:
        raise ConnectionResetError
    return str(name[0]).removeprefix("::ffff:")  # an IPv4 address on a dual-stack socket
