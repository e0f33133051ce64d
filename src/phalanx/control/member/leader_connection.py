"""The connection of a member to its leader, after the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import WSMsgType

from phalanx.control import channel, messages
from phalanx.control.channel import Channel
from phalanx.control.endpoint import Endpoint
from phalanx.control.messages import Pong, Welcome

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 5.0
_PINGS = 16  # pings that measure the clock skew


class MemberEvents(Protocol):
    """What a member reports."""

    def message_received(self, message: messages.FromLeader) -> None:
        """The leader has sent a message."""

    def leader_lost(self, why: str, *, silent: bool) -> None:
        """The leader is lost. `silent`: it may still run, but cannot be reached."""

    def note(self, text: str) -> None:
        """Print a line."""

    def waiting(self, text: str) -> None:
        """Show why the leader is not reached yet."""


class LeaderConnection:
    """Sends what is queued in `outbox`, passes messages to `events`, and notices when the leader is gone."""

    def __init__(
        self,
        ws: aiohttp.ClientWebSocketResponse,
        channel_: Channel,
        welcome: Welcome,
        outbox: asyncio.Queue[bytes | None],
        events: MemberEvents,
    ) -> None:
        ends = ws.get_extra_info("peername"), ws.get_extra_info("sockname")
        if not all(ends):
            raise ConnectionError("closed during the handshake")
        self.leader_address, self.own_address = (str(end[0]) for end in ends)
        self.leader_endpoint = Endpoint(*ends[0][:2])
        channel.tune(ws.get_extra_info("socket"))
        self._ws = ws
        self._channel = channel_
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
        """Send what is queued, and disconnect."""
        self._leaving = True
        self._outbox.put_nowait(None)
        await asyncio.wait(self._transfers, timeout=_CLOSE_TIMEOUT)

    async def close(self) -> None:
        """Disconnect at once."""
        self._leaving = True
        for task in (*self._transfers, self._monitor):
            task.cancel()
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            await asyncio.wait_for(self._ws.close(), _CLOSE_TIMEOUT)

    async def _read(self) -> None:
        why = "the connection to the leader closed: its agent was killed, or the machine went down"
        try:
            async for frame in self._ws:
                if frame.type != WSMsgType.BINARY:
                    break
                self._last_message = time.monotonic()
                self._dispatch(messages.from_leader.decode(self._channel.open(frame.data)))
        except (channel.ForgedFrameError, msgspec.MsgspecError) as error:
            why = f"the leader sent an invalid message ({type(error).__name__})"
        except ConnectionError as error:
            why = f"the connection to the leader broke ({error})"
        except Exception as error:  # a bug in a handler must not end the agent
            logger.debug("message of the leader failed", exc_info=True)
            why = f"a message of the leader could not be processed ({type(error).__name__}: {error})"
        self._leader_lost(why, silent=False)

    def _dispatch(self, message: messages.FromLeader) -> None:
        if isinstance(message, messages.Ping):
            self._offsets.append(time.time() - message.time)
            self._outbox.put_nowait(messages.encode(Pong(ping=message.time, time=time.time())))
            return
        self._over = self._over or isinstance(message, messages.EndMessage)
        self._events.message_received(message)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while (content := await self._outbox.get()) is not None:
                await self._ws.send_bytes(self._channel.seal(content))
            await self._ws.close()

    async def _watch(self) -> None:
        """Notice when the pings of the leader stop."""
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
                self._leader_lost(why, silent=True)
            elif (silence > limit) != quiet:
                quiet = silence > limit
                self._events.note(f"node 0 has not answered for {silence:.0f} s" if quiet else "node 0 answers again")

    def _leader_lost(self, why: str, *, silent: bool) -> None:
        if not self._leaving and not self._over:
            self._over = True
            self._events.leader_lost(why, silent=silent)
