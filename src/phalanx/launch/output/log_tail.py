"""A stream of a rank on its way to the console: what is still to be read of its log."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from threading import RLock
from typing import Protocol

from phalanx.launch.output.line_model import LineModel
from phalanx.launch.output.noise import Noise
from phalanx.launch.output.sink import Sink

CHUNK = 1 << 18  # read from a log at once
UNKEPT_LIMIT = 1 << 22  # of a stream that a full disk does not take, waiting for the console


class TailReader(Protocol):
    """The console, as far as a tail needs it."""

    lock: RLock

    def ready(self, tail: LogTail) -> None: ...


class LogTail:
    """A stream of a rank on its way to the console: extents of its log, and what the log did not take."""

    def __init__(self, console: TailReader, sink: Sink, lines: LineModel | None, log: int | None, size: int) -> None:
        self.sink = sink
        self.lines = lines  # None: straight through
        self.prefix = b""
        self.rank = 0
        self.live = False  # its unfinished rows are painted
        self.heard = 0.0
        self.noise: Noise | None = None  # what is left out
        self.showing = False  # an unfinished line is on the screen
        self.sign_at: float | None = None  # when to show how far a bar is that has no terminal
        self.sign = b""
        self.queued = False
        self.ended = False
        self.skipped = 0
        self._console = console
        self._log = log
        self._size = size
        self._parts: deque[range | bytes] = deque()
        self._unkept = 0

    def grew(self, size: int) -> None:
        """The log has `size` bytes now."""
        with self._console.lock:
            last = self._parts[-1] if self._parts else b""
            if isinstance(last, range):
                self._parts[-1] = range(last.start, size)
            else:
                self._parts.append(range(self._size, size))
            self._size = size
            self._console.ready(self)

    def unkept(self, data: bytes) -> None:
        """What the log could not take. It is in memory only, so there is a bound to it."""
        with self._console.lock:
            kept = data[: UNKEPT_LIMIT - self._unkept]
            self.skipped += len(data) - len(kept)
            if kept:
                self._unkept += len(kept)
                self._parts.append(kept)
                self._console.ready(self)

    def end(self) -> None:
        with self._console.lock:
            self.ended = True
            self._console.ready(self)

    def take(self) -> tuple[bytes, bool]:
        """The next bytes, and whether they are the last."""
        with self._console.lock:
            self.queued = False
            part = self._parts.popleft() if self._parts else b""
            if isinstance(part, range) and len(part) > CHUNK:
                self._parts.appendleft(part[CHUNK:])
                part = part[:CHUNK]
            elif isinstance(part, bytes):
                self._unkept -= len(part)
            if self._parts:
                self._console.ready(self)
            last = self.ended and not self._parts
        if self.sink.dead:
            return b"", last
        return (self._read(part) if isinstance(part, range) else part), last

    def pass_over(self) -> bool:
        """Go on behind all that there is. Whether nothing more comes."""
        with self._console.lock:
            self.queued = False
            self._parts.clear()
            self._unkept = 0
            return self.ended

    def _read(self, part: range) -> bytes:
        if self._log is not None and part:
            with contextlib.suppress(OSError):
                return os.pread(self._log, len(part), part.start)
        return b""

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None
