"""The connection of a member to its leader, after the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import WSMsgType

from phalanx.control import messages, tls
from phalanx.control.endpoint import Endpoint
from phalanx.control.messages import ConnectionResumed, Pong, Refusal, ResumeRequest, Welcome
from phalanx.control.outbox import LimitExceededError, Outbox

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 5.0
_RETRY_INTERVAL = 0.1  # seconds between two attempts to connect again
_ANSWER_TIMEOUT = 10.0  # seconds for the answer of the leader
_PINGS = 16  # pings that measure the clock skew


class MemberEvents(Protocol):
    """What a member reports."""

    def message_received(self, message: messages.FromLeader) -> None:
        """Handle a message of the leader."""

    def leader_lost(self, why: str, *, silent: bool) -> None:
        """Handle the loss of the leader. `silent`: it may still run, but cannot be reached."""

    def note(self, text: str) -> None:
        """Print a line."""

    def waiting(self, text: str) -> None:
        """Show why the leader has not been reached yet."""


class LeaderConnection:
    """Sends the messages queued in `outbox`, passes received ones to `events`, and detects the loss of the leader.

    If the connection breaks, it continues with another one from `connect`.
    """

    def __init__(
        self,
        ws: aiohttp.ClientWebSocketResponse,
        connect: Callable[[Endpoint], Awaitable[aiohttp.ClientWebSocketResponse]],
        welcome: Welcome,
        outbox: Outbox,
        events: MemberEvents,
    ) -> None:
        ends = ws.get_extra_info("peername"), ws.get_extra_info("sockname")
        if not all(ends):
            raise ConnectionError("closed during the handshake")
        self.leader_address, self.own_address = (str(end[0]) for end in ends)
        self.leader_endpoint = Endpoint(*ends[0][:2])
        tls.tune(ws.get_extra_info("socket"))
        self._ws = ws
        self._connect = connect
        self.welcome = welcome
        self._outbox = outbox
        self._events = events
        self._last_message = time.monotonic()
        self._leaving = False
        self._over = False  # the run has ended, or the leader is lost
        self._offsets: deque[float] = deque(maxlen=_PINGS)  # our clock minus that of the leader, per ping
        loop = asyncio.get_running_loop()
        self._transfers = [loop.create_task(self._read()), loop.create_task(self._write())]
        self._monitor = loop.create_task(self._watch())

    @property
    def skew(self) -> float:
        """Our clock minus that of the leader, by the fastest ping."""
        return min(self._offsets, default=0.0)

    async def flush(self) -> None:
        """Send queued messages, and disconnect."""
        self._leaving = True
        self._outbox.end()
        await asyncio.wait(self._transfers, timeout=_CLOSE_TIMEOUT)

    async def close(self) -> None:
        """Disconnect at once."""
        self._leaving = True
        for task in (*self._transfers, self._monitor):
            task.cancel()
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            await asyncio.wait_for(self._ws.close(), _CLOSE_TIMEOUT)

    async def _read(self) -> None:
        """Receive messages, also through new connections if one breaks, until the leader is lost."""
        while True:
            broken, why = await self._receive()
            if not broken or self._leaving or self._over or not await self._resume():
                break
        self.leader_lost(why, silent=False)

    async def _receive(self) -> tuple[bool, str]:
        """Receive messages until the connection ends. Return whether another one may help, and why it ended."""
        broken, why = False, ""
        try:
            async for frame in self._ws:
                if frame.type == WSMsgType.ERROR:
                    return True, f"the connection to the leader broke ({frame.data})"
                if frame.type != WSMsgType.BINARY:
                    return False, "the leader sent a text frame"
                self._last_message = time.monotonic()
                self._outbox.received += 1
                self._dispatch(messages.from_leader.decode(frame.data))
        except msgspec.MsgspecError as error:
            why = f"the leader sent an invalid message ({type(error).__name__})"
        except LimitExceededError as error:
            why = str(error)
        except (ConnectionError, aiohttp.ClientError) as error:
            broken, why = True, f"the connection to the leader broke ({error})"
        except Exception as error:  # a bug in a handler must not end the agent
            logger.debug("message of the leader failed", exc_info=True)
            why = f"a message of the leader could not be processed ({type(error).__name__}: {error})"
        else:
            broken, why = True, "the connection to the leader closed: its agent was killed, or the machine went down"
        return broken, why

    async def _resume(self) -> bool:
        """Connect again. Return False if the leader has ended or has removed this node."""
        self._transfers[1].cancel()
        until = time.monotonic() + self.welcome.resume
        while (left := until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    ws = await self._connect(self.leader_endpoint)
                    answer = await self._ask_to_resume(ws)
            except aiohttp.ClientConnectorError as error:
                if error.os_error.errno == errno.ECONNREFUSED:
                    return False
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError):  # TimeoutError, too
                pass
            else:
                if isinstance(answer, ConnectionResumed) and self._outbox.rewind(answer.received):
                    self._continue(ws)
                    return True
                await ws.close()
                return False
            await asyncio.sleep(_RETRY_INTERVAL)
        return False

    async def _ask_to_resume(self, ws: aiohttp.ClientWebSocketResponse) -> Welcome | ConnectionResumed | Refusal:
        request = ResumeRequest(
            member=self.welcome.member, session=self.welcome.session, received=self._outbox.received
        )
        try:
            await ws.send_bytes(messages.encode(request))
            return messages.answer.decode(await receive_bytes(ws))
        except BaseException:
            await ws.close()
            raise

    def _continue(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        tls.tune(ws.get_extra_info("socket"))
        self._ws, self._last_message = ws, time.monotonic()
        self._transfers[1] = asyncio.get_running_loop().create_task(self._write())
        self._events.note("connected to node 0 again: the connection had broken")

    def _dispatch(self, message: messages.FromLeader) -> None:
        if isinstance(message, messages.Ping):
            self._offsets.append(time.time() - message.time)
            self._outbox.acknowledge(message.received)
            pong = Pong(ping=message.time, time=time.time(), received=self._outbox.received)
            self._outbox.put(messages.encode(pong))
            return
        self._over = self._over or isinstance(message, messages.EndMessage)
        self._events.message_received(message)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._outbox.send_all(self._ws.send_bytes)
            await self._ws.close()

    async def _watch(self) -> None:
        """Detect that the leader no longer sends pings."""
        node_timeout, limit = self.welcome.node_timeout, self.welcome.quiet
        rest = min(1.0, node_timeout / 3)
        quiet = False
        while not self._over:
            asleep = time.monotonic()
            await asyncio.sleep(rest)
            now = time.monotonic()
            late = now - asleep - rest
            if late > 1:  # this process was stopped, or the machine was asleep
                self._last_message = min(self._last_message + late, now)
            silence = now - self._last_message
            if silence > node_timeout and not self._over and not self._leaving:
                why = f"no message from it for {silence:.0f} s (--node-timeout): link or machine is down"
                self.leader_lost(why, silent=True)
            elif (silence > limit) != quiet:
                quiet = silence > limit
                self._events.note(f"node 0 has not answered for {silence:.0f} s" if quiet else "node 0 answers again")

    def leader_lost(self, why: str, *, silent: bool) -> None:
        """Report once that the leader is lost."""
        if not self._leaving and not self._over:
            self._over = True
            self._events.leader_lost(why, silent=silent)


async def receive_bytes(ws: aiohttp.ClientWebSocketResponse) -> bytes:
    """Return the next message. Raises ConnectionError if there is none."""
    frame = await ws.receive(_ANSWER_TIMEOUT)
    if frame.type != WSMsgType.BINARY:
        raise ConnectionError("closed during the handshake")
    data: bytes = frame.data
    return data
