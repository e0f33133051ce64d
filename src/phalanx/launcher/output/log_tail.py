"""What the console has not yet shown of a rank's log."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from threading import RLock
from typing import Protocol

from phalanx.launcher.output.line_model import LineModel
from phalanx.launcher.output.noise import Noise
from phalanx.launcher.output.sink import Sink

CHUNK = 1 << 18  # read from a log at once
UNKEPT_LIMIT = 1 << 22  # bytes in memory that a full disk did not accept


class TailReader(Protocol):
    """The console, as far as a tail needs it."""

    lock: RLock

    def ready(self, tail: LogTail) -> None:
        """Queue a tail that has something to show."""


class LogTail:
    """The pending part of a stream: ranges of its log, and bytes that could not be written there."""

    def __init__(self, console: TailReader, sink: Sink, lines: LineModel | None, log: int | None, size: int) -> None:
        self.sink = sink
        self.lines = lines  # None: pass bytes unchanged
        self.prefix = b""
        self.rank = 0
        self.live = False  # its unfinished rows are painted
        self.last_data = 0.0
        self.noise: Noise | None = None  # hides lines
        self.showing = False  # an unfinished line is on the screen
        self.bar_due: float | None = None  # when to show the state of a bar where there is no terminal
        self.bar_shown = b""
        self.queued = False
        self.ended = False
        self.skipped = 0
        self._console = console
        self._log = log
        self._size = size
        self._parts: deque[range | bytes] = deque()
        self._unkept = 0

    def grew(self, size: int) -> None:
        """Note the new size of the log."""
        with self._console.lock:
            last = self._parts[-1] if self._parts else b""
            if isinstance(last, range):
                self._parts[-1] = range(last.start, size)
            else:
                self._parts.append(range(self._size, size))
            self._size = size
            self._console.ready(self)

    def unkept(self, data: bytes) -> None:
        """Take bytes that could not be written to the log. Only a limited number is kept in memory."""
        with self._console.lock:
            kept = data[: UNKEPT_LIMIT - self._unkept]
            self.skipped += len(data) - len(kept)
            if kept:
                self._unkept += len(kept)
                self._parts.append(kept)
                self._console.ready(self)

    def end(self) -> None:
        """Note that the log is complete."""
        with self._console.lock:
            self.ended = True
            self._console.ready(self)

    def take(self) -> tuple[bytes, bool]:
        """Return the next bytes, and whether they are the last."""
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

    def skip(self) -> bool:
        """Skip everything that is pending. Return whether the stream has ended."""
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
        """Close the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None
