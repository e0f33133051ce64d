"""The control plane on every other node: finds the leader, joins it, and reports why it cannot.

member = Member(token, info, endpoints, events=events)
welcome = await member.join(timeout=300)
member.send(message)
await member.leave()
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec
from aiohttp import WSMsgType

from phalanx.control import channel, messages
from phalanx.control.channel import Channel, Nonces
from phalanx.control.endpoint import Endpoint
from phalanx.control.leader.server import PATH, SERVER
from phalanx.control.member import join_problems
from phalanx.control.member.join_problems import JoinProblem
from phalanx.control.member.leader_connection import LeaderConnection, MemberEvents
from phalanx.control.messages import (
    Challenge,
    JoinAnswer,
    JoinRequest,
    Leaving,
    Message,
    NodeInfo,
    Refusal,
    Welcome,
)
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

_TRY_TIMEOUT = 10.0  # seconds per try: a leader that thousands call at once needs time
_SETTLED = 10.0  # seconds after which a wrong or unknown name is final
_CLOSE_TIMEOUT = 5.0
_WS_CLOSE_TIMEOUT = 2.0  # seconds for the leader to answer a close
_HELLO = f"GET {PATH} HTTP/1.1\r\nHost: phalanx\r\nConnection: close\r\n\r\n".encode()


class _RefusedError(Exception):
    """The leader was reached and refused this node."""

    def __init__(self, problem: JoinProblem) -> None:
        super().__init__(problem.what)
        self.problem = problem


class Member:
    """A node that is not the leader.

    `endpoints` returns where the leader may be. It is called before each try: the address may become known later.
    """

    def __init__(
        self,
        token: Token,
        info: NodeInfo,
        endpoints: Callable[[], Sequence[Endpoint]],
        *,
        events: MemberEvents,
    ) -> None:
        self._token = token
        self._info = info
        self._endpoints = endpoints
        self._events = events
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._session: aiohttp.ClientSession | None = None
        self._ws: aiohttp.ClientWebSocketResponse | None = None  # during the handshake
        self._connection: LeaderConnection | None = None
        self._dropped = False

    # -- joining

    async def join(self, timeout: float) -> Welcome:
        """Join the leader. Raises JoinError with the reason if it refuses, or after `timeout` seconds."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TRY_TIMEOUT))
        start = time.monotonic()
        rest = 0.1
        problem: JoinProblem | None = None
        same_since, same = start, ""
        while True:
            where, wait_for_place = self._endpoints(), False
            for endpoint in where:
                left = timeout - (time.monotonic() - start)
                try:
                    return await asyncio.wait_for(self._handshake(endpoint), min(_TRY_TIMEOUT, max(left, 1.0)))
                except _RefusedError as turned:
                    await self._abandon_handshake()
                    problem = turned.problem
                    # With elastic nodes, the one that has our number may be gone soon.
                    wait_for_place = problem.kind == "taken" and bool(self._info.failover_port)
                    break
                except (
                    aiohttp.ClientError,
                    OSError,
                    ValueError,
                    msgspec.MsgspecError,
                ):  # an invalid name raises ValueError
                    await self._abandon_handshake()
            now = time.monotonic()
            if problem is None or not problem.certain:
                problem = await self._diagnose(where)
            if problem.kind != same:
                same, same_since = problem.kind, now
            lasting = problem.kind in ("unresolved", "loopback", "not-phalanx") and now - same_since > _SETTLED
            if (problem.certain and not wait_for_place) or lasting or now - start >= timeout:
                await self._disconnect()
                raise self._absent(problem, now - start)
            self._events.waiting(f"waiting for the leader: {problem.what} ({now - start:.0f} s)")
            await asyncio.sleep(min(rest, max(timeout - (time.monotonic() - start), 0.01)))
            rest = min(rest * 1.5, 1.0)
            problem = None

    async def decline(self) -> None:
        """Tell the leader, if it can be reached, that this node cannot take part: the NodeInfo says why."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TRY_TIMEOUT))
        for endpoint in self._endpoints():
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError, _RefusedError):
                await self._handshake(endpoint)
        await self._disconnect()

    async def _handshake(self, endpoint: Endpoint) -> Welcome:
        if self._session is None:
            raise ConnectionError
        ws = self._ws = await self._session.ws_connect(
            f"http://{endpoint}{PATH}",
            max_msg_size=messages.FRAME_LIMIT,
            timeout=aiohttp.ClientWSTimeout(ws_close=_WS_CLOSE_TIMEOUT),
        )
        challenge = messages.handshake.decode(await _bytes(ws))
        if not isinstance(challenge, Challenge):
            raise ConnectionError
        if challenge.protocol != messages.PROTOCOL:
            mine, theirs = f"protocol {messages.PROTOCOL}", f"protocol {challenge.protocol}"
            raise _RefusedError(join_problems.refusal("version", mine=mine, theirs=theirs, leader=str(endpoint)))
        nonces = Nonces(challenge.nonce, channel.nonce())
        key, info = self._token.key, messages.encode(self._info)
        proof = channel.prove(key, channel.MEMBER, nonces, info)
        await ws.send_bytes(messages.encode(JoinRequest(nonce=nonces.member, info=info, proof=proof)))
        answer = messages.handshake.decode(await _bytes(ws))
        if not isinstance(answer, JoinAnswer):
            raise ConnectionError
        content = messages.answer.decode(answer.content)
        if not channel.proven(answer.proof, key, channel.LEADER, nonces, answer.content):
            raise _RefusedError(self._other_token(content, endpoint))
        if isinstance(content, Refusal):
            raise _RefusedError(self._refused(content, endpoint))
        self._connection = LeaderConnection(ws, Channel(key, nonces, leads=False), content, self._outbox, self._events)
        self._ws = None
        return content

    def _other_token(self, content: Welcome | Refusal, endpoint: Endpoint) -> JoinProblem:
        theirs = content.leader if isinstance(content, Refusal) else "unknown"
        return join_problems.refusal(
            "token",
            mine=f"from {self._token}",
            theirs=f"fingerprint {theirs}" if theirs else "none, it was started with --no-auth",
            leader=str(endpoint),
        )

    def _refused(self, refusal: Refusal, endpoint: Endpoint) -> JoinProblem:
        if refusal.kind == "trouble":
            return JoinProblem("other", refusal.member, certain=True)
        kinds: dict[str, join_problems.Kind] = {
            "run": "run",
            "plan": "plan",
            "version": "version",
            "taken": "taken",
            "devices": "devices",
        }
        kind = kinds.get(refusal.kind, "other")
        return join_problems.refusal(kind, mine=refusal.member, theirs=refusal.leader, leader=str(endpoint))

    async def _diagnose(self, where: Sequence[Endpoint]) -> JoinProblem:
        """Find out why the first address cannot be reached; the others are alternatives for it."""
        if not where:
            return JoinProblem("unresolved", "the address of the leader is not known yet")
        found = await join_problems.probe(*where[0], timeout=3.0, hello=_HELLO, expected=SERVER.encode())
        return found or JoinProblem("silent", f"the leader at {where[0]} does not answer the join request yet")

    def _absent(self, problem: JoinProblem, waited: float) -> JoinError:
        what = problem.what if problem.certain else f"the leader could not be reached in {waited:.0f} s: {problem.what}"
        return JoinError(what, details=problem.details, fix=problem.fix)

    # -- messages

    @property
    def connection(self) -> LeaderConnection:
        """Return the connection to the leader. Raises ConnectionError if there is none."""
        if self._connection is None:
            raise ConnectionError("not connected to the leader")
        return self._connection

    @property
    def leader_endpoint(self) -> Endpoint | None:
        """Return where the leader listens. None before the first connection."""
        return self._connection.leader_endpoint if self._connection is not None else None

    @property
    def skew(self) -> float:
        """Our clock minus that of the leader. 0 before the first connection."""
        return self._connection.skew if self._connection is not None else 0.0

    @property
    def queued(self) -> int:
        """The number of queued messages."""
        return self._outbox.qsize()

    def send(self, message: Message) -> None:
        """Send a message to the leader."""
        if not self._dropped:
            self._outbox.put_nowait(messages.encode(message))

    # -- the end

    async def leave(self, code: int = 0, text: str = "") -> None:
        """Tell the leader that this node leaves, and disconnect."""
        if self._connection is not None and not self._dropped:
            self.send(Leaving(code=code, text=text))
            await self._connection.flush()
        await self._disconnect()

    async def drop(self) -> None:
        """Disconnect from a lost leader without a message."""
        self._dropped = True
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        await self._abandon_handshake()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _abandon_handshake(self) -> None:
        if self._ws is not None:
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(self._ws.close(), _CLOSE_TIMEOUT)
            self._ws = None


async def _bytes(ws: aiohttp.ClientWebSocketResponse) -> bytes:
    frame = await ws.receive(_TRY_TIMEOUT)
    if frame.type != WSMsgType.BINARY:
        raise ConnectionError("closed during the handshake")
    data: bytes = frame.data
    return data
