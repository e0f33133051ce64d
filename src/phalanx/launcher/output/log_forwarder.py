"""Forwards the output of a follower's workers to the leader's terminal, at a limited rate.

It reads the log files, which are complete. If workers write faster than the rate allows, the oldest pending bytes are
skipped, and a note says so. The last traceback of a worker is not forwarded: the message about the failure reports it
(`withheld.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection

from phalanx.control.messages import Log
from phalanx.launcher.output.console.withheld import Withheld
from phalanx.launcher.output.filters import Std

RATE = 1 << 20  # bytes per second and node
BURST = 1 << 20
CHUNK = 1 << 16
BEHIND = BURST  # bytes per stream that may be pending
_PAUSE = 0.05  # seconds between two rounds, to send lines in batches
_QUEUED = 64  # messages that may be queued for the connection


class ForwardedStream:
    """One stream of one rank, and how much of it was sent."""

    def __init__(
        self, forwarder: LogForwarder, rank: int, std: Std, log: int | None, size: int, *, traceback: str | None
    ) -> None:
        self.rank = rank
        self.std = std
        self.log = None if log is None else os.dup(log)
        self.sent = self.size = size
        self.ended = False
        self.closed = False
        self.skipped = 0
        self.withheld = None if traceback is None else Withheld(traceback)
        self._forwarder = forwarder

    def grew(self, size: int) -> None:
        """Record the new size of the log."""
        self.size = size
        self._forwarder.wake()

    def unkept(self, data: bytes) -> None:
        """Count bytes that could not be written to the log: they are not sent either."""
        self.skipped += len(data)

    def end(self) -> None:
        """Record that the log is complete."""
        self.ended = True
        self._forwarder.wake()

    def take(self, most: int) -> bytes:
        """Return the next whole lines, or a part of a very long line, without withheld output."""
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
        return data if self.withheld is None else self.withheld.feed(data, time.monotonic())

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
        self._withheld: list[tuple[ForwardedStream, Withheld]] = []  # also of streams that have ended
        self._awake = asyncio.Event()
        self._idle = asyncio.Event()
        self._allowance = float(BURST)
        self._last = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def follow(
        self, rank: int, std: Std, log: int | None, size: int, *, traceback: str | None = None
    ) -> ForwardedStream:
        """Forward a stream from this position of its log.

        `traceback`: the file with the last traceback of the worker, which is withheld until `drop_withheld`.
        """
        stream = ForwardedStream(self, rank, std, log, size, traceback=traceback)
        self._streams.append(stream)
        if stream.withheld is not None:
            self._withheld.append((stream, stream.withheld))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return stream

    def wake(self) -> None:
        """Signal that there is something to send."""
        self._idle.clear()
        self._awake.set()

    def drop_withheld(self) -> None:
        """Drop the tracebacks of streams that have ended: the failures were reported."""
        for stream, withheld in self._withheld:
            if stream.ended:
                withheld.drop()

    async def settle(
        self, *, succeeded: Collection[int], reported: Callable[[str], bool] | None = None, timeout: float
    ) -> None:
        """At the end of an attempt, send the tracebacks that no message reports, and drop the others.

        `succeeded`: ranks that did not fail. `reported`: whether a message says the same as a text, after a signal;
        None: the failure of every other rank is reported.
        """
        if reported is not None:
            await self.drained(timeout)
        for stream, withheld in self._withheld:
            if stream.rank not in succeeded:
                withheld.drop(reported)
            if stream.rank in succeeded or reported is not None:
                self._send_released(stream, withheld.release())
        self._withheld = [(stream, withheld) for stream, withheld in self._withheld if not stream.closed]

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
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._awake.wait(), self._overdue_in())
            self._send_overdue()
            await asyncio.sleep(_PAUSE)
            self._awake.clear()
            if self._round():
                self._awake.set()
            else:
                self._idle.set()

    def _overdue_in(self) -> float | None:
        """Return the seconds until a traceback has waited too long."""
        due = min((withheld.due for _, withheld in self._withheld if withheld.due is not None), default=None)
        return None if due is None else max(due - time.monotonic(), 0.0)

    def _send_overdue(self) -> None:
        for stream, withheld in self._withheld:
            self._send_released(stream, withheld.overdue(time.monotonic()))

    def _send_released(self, stream: ForwardedStream, data: bytes) -> None:
        if data:
            self._send(Log(rank=stream.rank, stream=int(stream.std), data=data, skipped=0, ended=stream.closed))

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
