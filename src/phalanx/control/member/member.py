"""The control plane on every other node: finds the leader, joins it, and reports why it cannot.

member = Member(token, info, endpoints, events=events)
welcome = await member.join(timeout=300)
member.send(message)
await member.leave()
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from phalanx.control import messages, tls
from phalanx.control.endpoint import Endpoint
from phalanx.control.leader.server import FINGERPRINT, PATH, SERVER
from phalanx.control.member import join_problems
from phalanx.control.member.join_problems import JoinProblem
from phalanx.control.member.leader_connection import LeaderConnection, MemberEvents, receive_bytes
from phalanx.control.messages import (
    JoinRequest,
    Leaving,
    Message,
    NodeInfo,
    Refusal,
    Welcome,
)
from phalanx.control.outbox import LimitExceededError, Outbox
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

_TRY_TIMEOUT = 10.0  # seconds per attempt: a leader with thousands of concurrent callers needs time
_SETTLED = 10.0  # seconds after which a wrong address is final; a name may be published later
_CLOSE_TIMEOUT = 5.0
_WS_CLOSE_TIMEOUT = 2.0  # seconds for the leader to answer a close
_HELLO = f"GET {PATH} HTTP/1.1\r\nHost: phalanx\r\nConnection: close\r\n\r\n".encode()


class _RefusedError(Exception):
    """The leader was reached and rejected this node."""

    def __init__(self, problem: JoinProblem) -> None:
        super().__init__(problem.what)
        self.problem = problem


class Member:
    """A node that is not the leader.

    `endpoints` returns the possible addresses of the leader. It is called before each attempt: the address may become
    known later.
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
        self._outbox = Outbox()
        self._context: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None
        self._ws: aiohttp.ClientWebSocketResponse | None = None  # during the handshake
        self._connection: LeaderConnection | None = None
        self._dropped = False

    # -- joining

    async def join(self, timeout: float) -> Welcome:
        """Join the leader. Raises JoinError with the reason if it rejects this node, or after `timeout` seconds."""
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
                    # With elastic nodes, the node that has our number may be lost soon.
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
            lasting = problem.kind in ("loopback", "not-phalanx") and now - same_since > _SETTLED
            if (problem.certain and not wait_for_place) or lasting or now - start >= timeout:
                await self._disconnect()
                raise self._absent(problem, now - start)
            self._events.waiting(f"waiting for the leader: {problem.what} ({now - start:.0f} s)")
            await asyncio.sleep(min(rest, max(timeout - (time.monotonic() - start), 0.01)))
            rest = min(rest * 1.5, 1.0)
            problem = None

    async def decline(self) -> None:
        """Tell the leader, if it can be reached, that this node cannot take part. The NodeInfo contains the reason."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TRY_TIMEOUT))
        for endpoint in self._endpoints():
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError, _RefusedError):
                await self._handshake(endpoint)
        await self._disconnect()

    async def _handshake(self, endpoint: Endpoint) -> Welcome:
        try:
            ws = self._ws = await self._connect(endpoint)
        except aiohttp.ClientConnectorCertificateError:
            raise await self._other_token(endpoint) from None
        join = JoinRequest(protocol=messages.PROTOCOL, info=messages.encode(self._info))
        await ws.send_bytes(messages.encode(join))
        answer = messages.answer.decode(await receive_bytes(ws))
        if isinstance(answer, Refusal):
            raise _RefusedError(self._refused(answer, endpoint))
        if not isinstance(answer, Welcome):
            raise ConnectionError("another answer than expected")
        self._connection = LeaderConnection(ws, self._connect, answer, self._outbox, self._events)
        self._ws = None
        return answer

    async def _connect(self, endpoint: Endpoint) -> aiohttp.ClientWebSocketResponse:
        if self._session is None:
            raise ConnectionError
        return await self._session.ws_connect(
            f"https://{endpoint}{PATH}",
            ssl=self._tls(),
            max_msg_size=messages.FRAME_LIMIT,
            timeout=aiohttp.ClientWSTimeout(ws_close=_WS_CLOSE_TIMEOUT),
        )

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = tls.client_context(self._token)
        return self._context

    async def _other_token(self, endpoint: Endpoint) -> Exception:
        """Return the error about a leader with another token, and send the leader the fingerprint of this node's
        token.
        """
        if self._session is None:
            return ConnectionError()
        own = self._token.fingerprint if self._token.key else ""
        async with self._session.get(f"http://{endpoint}{PATH}", headers={FINGERPRINT: own}) as answer:
            if answer.headers.get("Server") != SERVER:
                return ConnectionError("another service")
            theirs = answer.headers.get(FINGERPRINT, "")[:16]
        problem = join_problems.refusal(
            "token",
            mine=f"from {self._token}",
            theirs=f"fingerprint {theirs}" if theirs else "none, it was started with --no-auth",
            leader=str(endpoint),
        )
        return _RefusedError(problem)

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
        """Determine why the first address cannot be reached; the others are alternatives to it."""
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
        """Return the address of the leader. None before the first connection."""
        return self._connection.leader_endpoint if self._connection is not None else None

    @property
    def skew(self) -> float:
        """Our clock minus that of the leader. 0 before the first connection."""
        return self._connection.skew if self._connection is not None else 0.0

    @property
    def queued(self) -> int:
        """The number of queued messages."""
        return self._outbox.unsent

    @property
    def backlog(self) -> int:
        """The bytes that the leader has not received yet."""
        return self._outbox.size

    def send(self, message: Message) -> None:
        """Send a message to the leader."""
        if not self._dropped:
            try:
                self._outbox.put(messages.encode(message))
            except LimitExceededError as error:
                if self._connection is not None:
                    self._connection.leader_lost(str(error), silent=True)

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
