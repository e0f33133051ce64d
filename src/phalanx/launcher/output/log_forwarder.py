"""Forwards the output of a follower's workers to the leader's terminal, at a limited rate.

It reads the log files, which are complete. If workers write faster than the rate allows, the oldest pending bytes are
skipped, and a note says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from phalanx.control.messages import Log
from phalanx.launcher.output.filters import Std

RATE = 1 << 20  # bytes per second and node
BURST = 1 << 20
CHUNK = 1 << 16
BEHIND = BURST  # bytes per stream that may be pending
_PAUSE = 0.05  # seconds between two rounds, to send lines in batches
_QUEUED = 64  # messages that may be queued for the connection


class ForwardedStream:
    """One stream of one rank, and how much of it was sent."""

    def __init__(self, forwarder: LogForwarder, rank: int, std: Std, log: int | None, size: int) -> None:
        self.rank = rank
        self.std = std
        self.log = None if log is None else os.dup(log)
        self.sent = self.size = size
        self.ended = False
        self.closed = False
        self.skipped = 0
        self._forwarder = forwarder

    def grew(self, size: int) -> None:
        """Note the new size of the log."""
        self.size = size
        self._forwarder.wake()

    def unkept(self, data: bytes) -> None:
        """Count bytes that could not be written to the log: they are not sent either."""
        self.skipped += len(data)

    def end(self) -> None:
        """Note that the log is complete."""
        self.ended = True
        self._forwarder.wake()

    def take(self, most: int) -> bytes:
        """Return the next whole lines, or a part of a very long line."""
        if self.size - self.sent > BEHIND:
            at = self.size - CHUNK
            at += self._read(at, CHUNK - 1).find(b"\n") + 1  # if it is one endless line, send at least its end
            self.skipped += at - self.sent
            self.sent = at
        data = self._read(self.sent, min(self.size - self.sent, most))
        if not self.ended:
            cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            data = data[:cut] if cut or len(data) < CHUNK else data
        self.sent += len(data)
        return data

    def _read(self, start: int, count: int) -> bytes:
        if self.log is not None and count > 0:
            with contextlib.suppress(OSError):
                return os.pread(self.log, count, start)
        return b""

    def close(self) -> None:
        """Close the log."""
        self.closed = True
        if self.log is not None:
            os.close(self.log)
            self.log = None


class LogForwarder:
    """Passes the output of followed streams to `send`. `waiting` returns the number of queued messages."""

    def __init__(self, send: Callable[[Log], None], waiting: Callable[[], int]) -> None:
        self._send = send
        self._waiting = waiting
        self._streams: list[ForwardedStream] = []
        self._awake = asyncio.Event()
        self._idle = asyncio.Event()
        self._allowance = float(BURST)
        self._last = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def follow(self, rank: int, std: Std, log: int | None, size: int) -> ForwardedStream:
        """Forward a stream from this position of its log."""
        stream = ForwardedStream(self, rank, std, log, size)
        self._streams.append(stream)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return stream

    def wake(self) -> None:
        """Note that there is something to send."""
        self._idle.clear()
        self._awake.set()

    async def drained(self, timeout: float) -> None:
        """Wait until everything is sent."""
        if self._task is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)

    def close(self) -> None:
        """Stop forwarding."""
        if self._task is not None:
            self._task.cancel()
        for stream in self._streams:
            stream.close()

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            await asyncio.sleep(_PAUSE)
            self._awake.clear()
            if self._round():
                self._awake.set()
            else:
                self._idle.set()

    def _round(self) -> bool:
        """Send a chunk of every stream. Return whether there is more."""
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._last) * RATE, BURST)
        self._last = now
        for stream in list(self._streams):
            if self._waiting() > _QUEUED or self._allowance <= 0:
                return True
            self._send_some(stream)
        return any(stream.ended or stream.size - stream.sent > CHUNK for stream in self._streams)

    def _send_some(self, stream: ForwardedStream) -> None:
        data = stream.take(CHUNK)
        last = stream.ended and stream.sent >= stream.size
        if data or stream.skipped or last:
            self._allowance -= len(data)
            self._send(Log(rank=stream.rank, stream=int(stream.std), data=data, skipped=stream.skipped, ended=last))
            stream.skipped = 0
        if last:
            stream.close()
            self._streams.remove(stream)
