"""Messages to another node: queued until they are sent, and kept until the node has acknowledged them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

LIMIT = 1 << 26  # bytes that are not acknowledged


class LimitExceededError(Exception):
    """Another node uses more memory or open requests of this one than the limit."""


class Outbox:
    """The messages to one node. `size`: their bytes, until they are acknowledged; `received`: messages from that node.

    A connection counts the messages that it receives. Each side reports its count with the pings, and the other side
    then drops that many of the messages that it kept.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.size = 0
        self.received = 0
        self._limit = limit
        self._unsent: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()  # not acknowledged yet
        self._acknowledged = 0
        self._ended = False
        self._wake = asyncio.Event()
        self._sending_since: float | None = None

    @property
    def unsent(self) -> int:
        """The number of messages that wait to be sent."""
        return len(self._unsent)

    def put(self, content: bytes) -> None:
        """Queue a message. Raises LimitExceededError if the node does not read."""
        if self.size + len(content) > self._limit:
            raise LimitExceededError(f"it has not read {self.size / (1 << 20):.0f} MiB that were sent to it")
        self.size += len(content)
        self._unsent.append(content)
        self._wake.set()

    def end(self) -> None:
        """Make `send_all` return once everything is sent."""
        self._ended = True
        self._wake.set()

    def clear(self) -> None:
        """Drop all messages."""
        self._unsent.clear()
        self._sent.clear()
        self.size = 0

    async def send_all(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Pass messages to `send`, one after the other, until `end` is called and all are sent."""
        try:
            while self._unsent or not self._ended:
                if not self._unsent:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                content = self._unsent.popleft()
                self._sent.append(content)
                self._sending_since = time.monotonic()
                await send(content)
                self._sending_since = None
        finally:
            self._sending_since = None

    def acknowledge(self, count: int) -> None:
        """Drop the messages that the node has received: the first `count` of all."""
        while self._sent and self._acknowledged < count:
            self.size -= len(self._sent.popleft())
            self._acknowledged += 1

    def rewind(self, received: int) -> bool:
        """Send the messages again that the node has not received, after the connection broke. Return False if
        `received` is impossible.
        """
        if not self._acknowledged <= received <= self._acknowledged + len(self._sent):
            return False
        self.acknowledge(received)
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        self._wake.set()
        return True

    def stalled(self, now: float) -> float:
        """Return for how many seconds the node has not read the message being sent."""
        return now - self._sending_since if self._sending_since is not None else 0.0

    def excuse(self, seconds: float) -> None:
        """Do not count these seconds: this process was stopped."""
        if self._sending_since is not None:
            self._sending_since += seconds
