"""The part of a rank's log that the console has not shown yet."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from threading import RLock

from phalanx.launcher.output.console.noise import Noise
from phalanx.launcher.output.console.withheld import Withheld

CHUNK = 1 << 18  # read from a log at once
UNKEPT_LIMIT = 1 << 22  # bytes in memory that a full disk did not accept


def _nothing() -> None:
    pass


class LogTail:
    """The pending part of a stream: ranges of its log, and bytes that could not be written there.

    `ready` is called, with the lock held, when there is something to read.
    """

    def __init__(self, lock: RLock, ready: Callable[[], None], log: int | None, size: int) -> None:
        self.queued = False
        self.skipped = 0
        self.noise: Noise | None = None  # lines that are not shown
        self.withheld: Withheld | None = None  # the last traceback
        self._lock = lock
        self._ready = ready
        self._log = log
        self._size = size
        self._parts: deque[range | bytes] = deque()
        self._unkept = 0
        self._ended = False

    def grew(self, size: int) -> None:
        """Record the new size of the log."""
        with self._lock:
            last = self._parts[-1] if self._parts else b""
            if isinstance(last, range):
                self._parts[-1] = range(last.start, size)
            else:
                self._parts.append(range(self._size, size))
            self._size = size
            self._ready()

    def unkept(self, data: bytes) -> None:
        """Keep bytes that could not be written to the log. Only a limited number is kept in memory."""
        with self._lock:
            kept = data[: UNKEPT_LIMIT - self._unkept]
            self.skipped += len(data) - len(kept)
            if kept:
                self._unkept += len(kept)
                self._parts.append(kept)
                self._ready()

    def end(self) -> None:
        """Record that the log is complete."""
        with self._lock:
            self._ended = True
            self._ready()

    def take(self, *, read: bool = True) -> tuple[bytes, bool]:
        """Return the next bytes, and whether they are the last. Without `read`, skip these bytes."""
        with self._lock:
            self.queued = False
            part = self._parts.popleft() if self._parts else b""
            if isinstance(part, range) and len(part) > CHUNK:
                self._parts.appendleft(part[CHUNK:])
                part = part[:CHUNK]
            elif isinstance(part, bytes):
                self._unkept -= len(part)
            if self._parts:
                self._ready()
            last = self._ended and not self._parts
        if not read:
            return b"", last
        return (self._read(part) if isinstance(part, range) else part), last

    def skip(self) -> bool:
        """Skip everything pending. Return whether the stream has ended."""
        with self._lock:
            self.queued = False
            self._parts.clear()
            self._unkept = 0
            return self._ended

    def _read(self, part: range) -> bytes:
        if self._log is not None and part:
            with contextlib.suppress(OSError):
                return os.pread(self._log, len(part), part.start)
        return b""

    def close(self) -> None:
        """Close the log. Nothing is ready any more: `ready` holds the stream, which holds this."""
        self._ready = _nothing
        if self._log is not None:
            os.close(self._log)
            self._log = None
