"""What the workers of a member write, on its way to the terminal of node 0: within a rate, and never in their way.

The files of a node are complete; what is relayed is read from them. Where workers write faster than the rate allows,
the oldest that waits is left out, and that is said in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from phalanx.control.messages import Log
from phalanx.launch.output.filters import Std

RATE = 1 << 20  # bytes a second, of one node
BURST = 1 << 20
CHUNK = 1 << 16
BEHIND = BURST  # bytes of one stream that may wait
_PAUSE = 0.05  # between two rounds: lines that come together go together
_QUEUED = 64  # messages that may wait for the wire


class ForwarderThread:
    """One stream of one rank."""

    def __init__(self, relay: LogForwarder, rank: int, std: Std, log: int | None, size: int) -> None:
        self.rank = rank
        self.std = std
        self.log = None if log is None else os.dup(log)
        self.sent = self.size = size
        self.ended = False
        self.closed = False
        self.skipped = 0
        self._relay = relay

    def grew(self, size: int) -> None:
        self.size = size
        self._relay.wake()

    def unkept(self, data: bytes) -> None:
        """What the disk did not take is not sent either: only the terminal of its own node shows it."""
        self.skipped += len(data)

    def end(self) -> None:
        self.ended = True
        self._relay.wake()

    def take(self, most: int) -> bytes:
        """The next whole lines, or what there is of a very long one, or of one that waits to be finished."""
        if self.size - self.sent > BEHIND:
            at = self.size - CHUNK
            at += self._read(at, CHUNK - 1).find(b"\n") + 1  # of one endless line at least its end
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
        self.closed = True
        if self.log is not None:
            os.close(self.log)
            self.log = None


class LogForwarder:
    """`follow` a stream; what it writes is given to `send`. `waiting` says how much of it has not gone out yet."""

    def __init__(self, send: Callable[[Log], None], waiting: Callable[[], int]) -> None:
        self._send = send
        self._waiting = waiting
        self._threads: list[ForwarderThread] = []
        self._awake = asyncio.Event()
        self._idle = asyncio.Event()
        self._allowance = float(BURST)
        self._last = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def follow(self, rank: int, std: Std, log: int | None, size: int) -> ForwarderThread:
        thread = ForwarderThread(self, rank, std, log, size)
        self._threads.append(thread)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return thread

    def wake(self) -> None:
        self._idle.clear()
        self._awake.set()

    async def drained(self, timeout: float) -> None:
        """Until what there is has been sent."""
        if self._task is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for thread in self._threads:
            thread.close()

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
        """A chunk of every stream. Whether there is more."""
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._last) * RATE, BURST)
        self._last = now
        for thread in list(self._threads):
            if self._waiting() > _QUEUED or self._allowance <= 0:
                return True
            self._send_some(thread)
        return any(thread.ended or thread.size - thread.sent > CHUNK for thread in self._threads)

    def _send_some(self, thread: ForwarderThread) -> None:
        data = thread.take(CHUNK)
        last = thread.ended and thread.sent >= thread.size
        if data or thread.skipped or last:
            self._allowance -= len(data)
            self._send(Log(rank=thread.rank, stream=int(thread.std), data=data, skipped=thread.skipped, ended=last))
            thread.skipped = 0
        if last:
            thread.close()
            self._threads.remove(thread)
