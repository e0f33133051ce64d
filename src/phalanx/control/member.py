"""The control plane on every other node: finds the leader, joins it, and reports why it cannot.

member = Member(token, info, where, events=events)
welcome = await member.join(timeout=300)
member.send(message)
await member.leave()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import aiohttp
import msgspec
from aiohttp import WSMsgType

from phalanx.control import channel, join_problems, messages
from phalanx.control.channel import Channel, Nonces
from phalanx.control.join_problems import JoinProblem
from phalanx.control.leader import PATH, SERVER
from phalanx.control.messages import (
    Challenge,
    JoinAnswer,
    JoinRequest,
    Leaving,
    Message,
    NodeInfo,
    Pong,
    Refusal,
    Welcome,
)
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

logger = logging.getLogger(__name__)

_TRY = 10.0  # seconds per try: a leader that thousands call at once needs time
_SETTLED = 10.0  # seconds after which a wrong or unknown name is final
_CLOSING = 5.0
CONNECT_TIMEOUT = 3.0  # seconds
STEADILY = 0.5  # seconds for which a live leader keeps a connection
_GOODBYE = 2.0  # seconds for the leader to answer a close
_PINGS = 16  # pings that measure the clock skew
_HELLO = f"GET {PATH} HTTP/1.1\r\nHost: phalanx\r\nConnection: close\r\n\r\n".encode()


class Endpoint(NamedTuple):
    """An address and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def answers(endpoint: Endpoint, *, steadily: float = 0.0) -> bool:
    """Return whether a process listens there.

    `steadily`: it must keep the connection for so many seconds. A process that is being killed loses its connections a
    moment before it stops listening.
    """
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*endpoint), CONNECT_TIMEOUT)
    except OSError:
        return False
    try:
        if steadily:
            await asyncio.wait_for(reader.read(1), steadily)
            return False
    except TimeoutError:
        pass
    except OSError:
        return False
    finally:
        writer.close()
    return True


class MemberEvents(Protocol):
    """What a member reports."""

    def heard(self, message: messages.FromLeader) -> None:
        """The leader has sent a message."""

    def lost(self, why: str, *, silent: bool) -> None:
        """The leader is lost. `silent`: it may still run, but cannot be reached."""

    def note(self, text: str) -> None:
        """Print a line."""

    def waiting(self, text: str) -> None:
        """Show why the leader is not reached yet."""


class _RefusedError(Exception):
    """The leader was reached and refused this node."""

    def __init__(self, problem: JoinProblem) -> None:
        super().__init__(problem.what)
        self.problem = problem


class Member:
    """A node that is not the leader."""

    def __init__(
        self,
        token: Token,
        arrival: NodeInfo,
        where: Callable[[], Sequence[Endpoint]],
        *,
        events: MemberEvents,
    ) -> None:
        self.leader_address = ""  # address of the leader
        self.own_address = ""  # our address towards it
        self.door: Endpoint | None = None  # where the leader listens
        self.welcome: Welcome | None = None
        self._token = token
        self._arrival = arrival
        self._where = where  # called at every try: the address may become known later
        self._events = events
        self._session: aiohttp.ClientSession | None = None
        self._ws: aiohttp.ClientWebSocketResponse | None = None
        self._channel: Channel | None = None
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = 0.0
        self._leaving = False
        self._over = False  # the run has ended, or the leader is lost
        self._dropped = False
        self._ahead: deque[float] = deque(maxlen=_PINGS)  # our clock minus that of the leader, per ping

    # -- joining

    async def join(self, timeout: float) -> Welcome:
        """Join the leader. Raises JoinError with the reason if it refuses, or after `timeout` seconds."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TRY))
        start = time.monotonic()
        rest = 0.1
        problem: JoinProblem | None = None
        same_since, same = start, ""
        while True:
            where, wait_for_place = self._where(), False
            for endpoint in where:
                left = timeout - (time.monotonic() - start)
                try:
                    return await asyncio.wait_for(self._enter(endpoint), min(_TRY, max(left, 1.0)))
                except _RefusedError as turned:
                    await self._hang_up(session=False)
                    problem = turned.problem
                    # With elastic nodes, the one that has our number may be gone soon.
                    wait_for_place = problem.kind == "taken" and bool(self._arrival.door)
                    break
                except (
                    aiohttp.ClientError,
                    OSError,
                    ValueError,
                    msgspec.MsgspecError,
                ):  # an invalid name raises ValueError
                    await self._hang_up(session=False)
            now = time.monotonic()
            if problem is None or not problem.certain:
                problem = await self._diagnose(where)
            if problem.kind != same:
                same, same_since = problem.kind, now
            lasting = problem.kind in ("unresolved", "loopback", "not-phalanx") and now - same_since > _SETTLED
            if (problem.certain and not wait_for_place) or lasting or now - start >= timeout:
                await self._hang_up()
                raise self._absent(problem, now - start)
            self._events.waiting(f"waiting for the leader: {problem.what} ({now - start:.0f} s)")
            await asyncio.sleep(min(rest, max(timeout - (time.monotonic() - start), 0.01)))
            rest = min(rest * 1.5, 1.0)
            problem = None

    async def excuse(self) -> None:
        """Tell the leader, if it can be reached, that this node cannot take part: the NodeInfo says why."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TRY))
        for endpoint in self._where():
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError, _RefusedError):
                await self._enter(endpoint)
        await self._hang_up()

    async def _enter(self, endpoint: Endpoint) -> Welcome:
        if self._session is None:
            raise ConnectionError
        ws = self._ws = await self._session.ws_connect(
            f"http://{endpoint}{PATH}",
            max_msg_size=messages.FRAME_LIMIT,
            timeout=aiohttp.ClientWSTimeout(ws_close=_GOODBYE),
        )
        challenge = messages.handshake.decode(await _bytes(ws))
        if not isinstance(challenge, Challenge):
            raise ConnectionError
        if challenge.protocol != messages.PROTOCOL:
            mine, theirs = f"protocol {messages.PROTOCOL}", f"protocol {challenge.protocol}"
            raise _RefusedError(join_problems.refusal("version", mine=mine, theirs=theirs, leader=str(endpoint)))
        nonces = Nonces(challenge.nonce, channel.nonce())
        key, words = self._token.key, messages.encode(self._arrival)
        proof = channel.prove(key, channel.MEMBER, nonces, words)
        await ws.send_bytes(messages.encode(JoinRequest(nonce=nonces.member, arrival=words, proof=proof)))
        answer = messages.handshake.decode(await _bytes(ws))
        if not isinstance(answer, JoinAnswer):
            raise ConnectionError
        content = messages.answer.decode(answer.content)
        if not channel.proven(answer.proof, key, channel.LEADER, nonces, answer.content):
            raise _RefusedError(self._other_token(content, endpoint))
        if isinstance(content, Refusal):
            raise _RefusedError(self._refused(content, endpoint))
        self._channel = Channel(key, nonces, leads=False)
        ends = ws.get_extra_info("peername"), ws.get_extra_info("sockname")
        if not all(ends):
            raise ConnectionError("closed during the handshake")
        self.leader_address, self.own_address = (str(end[0]) for end in ends)
        self.door = Endpoint(*ends[0][:2])
        channel.tune(ws.get_extra_info("socket"))
        self.welcome = content
        self._heard = time.monotonic()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._read(ws)),
            loop.create_task(self._write(ws)),
            loop.create_task(self._watch()),
        ]
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

    async def _read(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        why = "the connection to the leader closed: its agent was killed, or the machine went down"
        try:
            async for frame in ws:
                if frame.type != WSMsgType.BINARY or self._channel is None:
                    break
                self._heard = time.monotonic()
                message = messages.from_leader.decode(self._channel.open(frame.data))
                if isinstance(message, messages.Ping):
                    self._ahead.append(time.time() - message.time)
                    self.send(Pong(ping=message.time, time=time.time()))
                    continue
                self._over = self._over or isinstance(message, messages.EndMessage)
                self._events.heard(message)
        except (channel.ForgedFrameError, msgspec.MsgspecError) as error:
            why = f"the leader sent an invalid message ({type(error).__name__})"
        except ConnectionError as error:
            why = f"the connection to the leader broke ({error})"
        except Exception as error:  # a bug in a handler must not end the agent
            logger.debug("message of the leader failed", exc_info=True)
            why = f"a message of the leader could not be processed ({type(error).__name__}: {error})"
        if not self._leaving and not self._over:
            self._over = True
            self._events.lost(why, silent=False)

    async def _write(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while (content := await self._outbox.get()) is not None and self._channel is not None:
                await ws.send_bytes(self._channel.seal(content))
            await ws.close()

    async def _watch(self) -> None:
        """Notice when the pings of the leader stop."""
        if self.welcome is None:
            return
        node_timeout, limit = self.welcome.node_timeout, self.welcome.quiet
        rest = min(1.0, node_timeout / 3)
        quiet = False
        while not self._over:
            asleep = time.monotonic()
            await asyncio.sleep(rest)
            now = time.monotonic()
            late = now - asleep - rest
            if late > 1:  # this process was stopped, or the machine was asleep
                self._heard = min(self._heard + late, now)
            silence = now - self._heard
            if silence > node_timeout and not self._over and not self._leaving:
                self._over = True
                why = f"no message from it for {silence:.0f} s (--node-timeout): link or machine is down"
                self._events.lost(why, silent=True)
            elif (silence > limit) != quiet:
                quiet = silence > limit
                self._events.note(f"node 0 has not answered for {silence:.0f} s" if quiet else "node 0 answers again")

    @property
    def skew(self) -> float:
        """Our clock minus that of the leader, by the fastest ping."""
        return min(self._ahead, default=0.0)

    @property
    def waiting(self) -> int:
        """The number of queued messages."""
        return self._outbox.qsize()

    def send(self, message: Message) -> None:
        """Send a message to the leader."""
        if self._dropped:
            return
        self._outbox.put_nowait(messages.encode(message))

    # -- the end

    async def leave(self, code: int = 0, text: str = "") -> None:
        """Tell the leader that this node leaves, and disconnect."""
        if self._tasks:
            self._leaving = True
            self.send(Leaving(code=code, text=text))
            self._outbox.put_nowait(None)
            await asyncio.wait(self._tasks[:2], timeout=_CLOSING)
        await self._hang_up()

    async def drop(self) -> None:
        """Disconnect from a lost leader without a message."""
        self._dropped = True
        await self._hang_up()

    async def _hang_up(self, *, session: bool = True) -> None:
        self._leaving = self._leaving or bool(self._tasks)
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._ws is not None:
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(self._ws.close(), _CLOSING)
            self._ws = None
        if session and self._session is not None:
            await self._session.close()
            self._session = None


async def _bytes(ws: aiohttp.ClientWebSocketResponse) -> bytes:
    frame = await ws.receive(_TRY)
    if frame.type != WSMsgType.BINARY:
        raise ConnectionError("closed during the handshake")
    data: bytes = frame.data
    return data
