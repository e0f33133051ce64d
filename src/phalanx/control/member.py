"""Every other node's side of the control plane: finds the leader, proves itself, and says why where it cannot.

member = Member(token, arrival, where, ears=ears)
welcome = await member.join(timeout=300)
member.send(message)
await member.leave()
"""

from __future__ import annotations

import asyncio
import contextlib
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

_TRY = 10.0  # seconds for one try: a leader that thousands call at once takes one after the other
_SETTLED = 10.0  # seconds after which a name that does not resolve, or leads elsewhere, will not change by itself
_CLOSING = 5.0
KNOCK = 3.0  # seconds for a machine to answer at all
STEADILY = 0.5  # seconds for which one that has not ended keeps a connection
_GOODBYE = 2.0  # seconds for the leader to answer that we close
_PINGS = 16  # that tell how two clocks differ
_HELLO = f"GET {PATH} HTTP/1.1\r\nHost: phalanx\r\nConnection: close\r\n\r\n".encode()


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def answers(endpoint: Endpoint, *, steadily: float = 0.0) -> bool:
    """Whether somebody listens there: a process that has ended does not, and its machine says so at once.

    `steadily`: for so many seconds. One that is being killed loses its connections a moment before it stops to listen.
    """
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*endpoint), KNOCK)
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
    def heard(self, message: messages.FromLeader) -> None: ...
    def lost(self, why: str, *, silent: bool) -> None:
        """`silent`: nobody knows whether the leader still runs, and only cannot be reached."""

    def note(self, text: str) -> None: ...
    def waiting(self, text: str) -> None: ...


class _RefusedError(Exception):
    """The leader was reached, and did not let us in."""

    def __init__(self, obstacle: JoinProblem) -> None:
        super().__init__(obstacle.what)
        self.obstacle = obstacle


class Member:
    def __init__(
        self,
        token: Token,
        arrival: NodeInfo,
        where: Callable[[], Sequence[Endpoint]],
        *,
        ears: MemberEvents,
    ) -> None:
        self.leader_address = ""  # where it was reached
        self.own_address = ""  # from where
        self.door: Endpoint | None = None  # of the leader
        self.welcome: Welcome | None = None
        self._token = token
        self._arrival = arrival
        self._where = where  # asked again at every try: a meeting place may become known later
        self._ears = ears
        self._session: aiohttp.ClientSession | None = None
        self._ws: aiohttp.ClientWebSocketResponse | None = None
        self._channel: Channel | None = None
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = 0.0
        self._leaving = False
        self._over = False  # the leader has said that the run has ended
        self._dropped = False
        self._ahead: deque[float] = deque(maxlen=_PINGS)  # our clock minus the leader's, by the last pings

    # -- coming in

    async def join(self, timeout: float) -> Welcome:
        """Until the leader has let us in. Raises JoinError with the reason when it will not, or the time is up."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TRY))
        start = time.monotonic()
        rest = 0.1
        obstacle: JoinProblem | None = None
        same_since, same = start, ""
        while True:
            where, patient = self._where(), False
            for endpoint in where:
                left = timeout - (time.monotonic() - start)
                try:
                    return await asyncio.wait_for(self._enter(endpoint), min(_TRY, max(left, 1.0)))
                except _RefusedError as turned:
                    await self._hang_up(session=False)
                    obstacle = turned.obstacle
                    # Where nodes come and go, whoever has our place may be gone soon, or be gone and not missed yet.
                    patient = obstacle.kind == "taken" and bool(self._arrival.door)
                    break
                except (aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError):  # a bad name is a ValueError
                    await self._hang_up(session=False)
            now = time.monotonic()
            if obstacle is None or not obstacle.certain:
                obstacle = await self._diagnose(where)
            if obstacle.kind != same:
                same, same_since = obstacle.kind, now
            lasting = obstacle.kind in ("unresolved", "loopback", "stranger") and now - same_since > _SETTLED
            if (obstacle.certain and not patient) or lasting or now - start >= timeout:
                await self._hang_up()
                raise self._absent(obstacle, now - start)
            self._ears.waiting(f"waiting for the leader: {obstacle.what} ({now - start:.0f} s)")
            await asyncio.sleep(min(rest, max(timeout - (time.monotonic() - start), 0.01)))
            rest = min(rest * 1.5, 1.0)
            obstacle = None

    async def excuse(self) -> None:
        """Tell the leader that this node cannot take part: the arrival says why. Nobody may be there to hear it."""
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
        challenge = messages.door.decode(await _bytes(ws))
        if not isinstance(challenge, Challenge):
            raise ConnectionError
        if challenge.protocol != messages.PROTOCOL:
            mine, theirs = f"protocol {messages.PROTOCOL}", f"protocol {challenge.protocol}"
            raise _RefusedError(join_problems.refusal("version", mine=mine, theirs=theirs, leader=str(endpoint)))
        nonces = Nonces(challenge.nonce, channel.nonce())
        key, words = self._token.key, messages.encode(self._arrival)
        proof = channel.prove(key, channel.MEMBER, nonces, words)
        await ws.send_bytes(messages.encode(JoinRequest(nonce=nonces.member, arrival=words, proof=proof)))
        answer = messages.door.decode(await _bytes(ws))
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
            raise ConnectionError("closed at the door")
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
        """Of the first place: the others are further guesses at the same one."""
        if not where:
            return JoinProblem("unresolved", "where the leader is, is not known yet")
        found = await join_problems.probe(*where[0], timeout=3.0, hello=_HELLO, expected=SERVER.encode())
        return found or JoinProblem("silent", f"the leader at {where[0]} answers, but not to us yet")

    def _absent(self, obstacle: JoinProblem, waited: float) -> JoinError:
        what = (
            obstacle.what if obstacle.certain else f"the leader could not be reached in {waited:.0f} s: {obstacle.what}"
        )
        return JoinError(what, details=obstacle.details, fix=obstacle.fix)

    # -- conversation

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
                self._ears.heard(message)
        except (channel.ForgedFrameError, msgspec.MsgspecError) as error:
            why = f"the leader sent what is not a message of phalanx ({type(error).__name__})"
        except ConnectionError as error:
            why = f"the connection to the leader broke ({error})"
        except Exception as error:  # ours, but better told than swallowed
            why = f"what the leader said could not be followed ({type(error).__name__}: {error})"
        if not self._leaving and not self._over:
            self._over = True
            self._ears.lost(why, silent=False)

    async def _write(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while (content := await self._outbox.get()) is not None and self._channel is not None:
                await ws.send_bytes(self._channel.seal(content))
            await ws.close()

    async def _watch(self) -> None:
        """The leader sends a word at least every few seconds."""
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
            if late > 1:  # it was us who did not listen
                self._heard = min(self._heard + late, now)
            silence = now - self._heard
            if silence > node_timeout and not self._over and not self._leaving:
                self._over = True
                why = f"not a word from it in {silence:.0f} s (--node-timeout): link or machine is down"
                self._ears.lost(why, silent=True)
            elif (silence > limit) != quiet:
                quiet = silence > limit
                self._ears.note(f"node 0 has not answered for {silence:.0f} s" if quiet else "node 0 answers again")

    @property
    def skew(self) -> float:
        """Our clock minus the leader's, as well as it is known: the ping that came quickest tells most."""
        return min(self._ahead, default=0.0)

    @property
    def waiting(self) -> int:
        """Messages that have not gone out yet."""
        return self._outbox.qsize()

    def send(self, message: Message) -> None:
        if self._dropped:  # nobody would ever take it
            return
        self._outbox.put_nowait(messages.encode(message))

    # -- the end

    async def leave(self, code: int = 0, text: str = "") -> None:
        """Say so, and go."""
        if self._tasks:
            self._leaving = True
            self.send(Leaving(code=code, text=text))
            self._outbox.put_nowait(None)
            await asyncio.wait(self._tasks[:2], timeout=_CLOSING)
        await self._hang_up()

    async def drop(self) -> None:
        """The leader is lost: nothing can be said to it, and nothing that it might still say is heard."""
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
        raise ConnectionError("closed at the door")
    data: bytes = frame.data
    return data
