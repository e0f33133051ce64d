"""Reads events and samples of a run from its files, ordered by time, in parts.

The position is in a cursor that the reader keeps, so that this module has no state.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import BinaryIO

import msgspec

PART = 1 << 18  # bytes returned at a time
_READ = 1 << 22  # bytes read for that, and then the rest of a line
_LONGEST = 1 << 25  # bytes; no line of ours is longer: a sample of 32,768 ranks has 5 MB
FILES = ("events.jsonl", "samples.jsonl")
SLACK = 10.0  # seconds by which an event may be older than one before it: two periods of samples of many nodes
_TIME = re.compile(rb'\{"event":"[^"]*","time":(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)')  # how our encoder begins a line
_HEAD = 128  # bytes that contain it


class EventCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A position in the files of a run."""

    at: tuple[int, int]  # offsets in the files
    end: tuple[int, int]  # where to stop: later lines are sent when they happen
    since: float = 0.0  # skip older events


def begin(folder: str, since: float | None = None) -> EventCursor:
    """Return a cursor for everything that exists now."""
    sizes = []
    for name in FILES:
        try:
            sizes.append(os.stat(os.path.join(folder, name)).st_size)
        except OSError:
            sizes.append(0)
    return EventCursor(at=(0, 0), end=(sizes[0], sizes[1]), since=since - SLACK if since is not None else 0.0)


def further(folder: str, before: tuple[int, int]) -> EventCursor:
    """Return a cursor for the whole lines written since `before`. The writer may be another host."""
    ends = [_line_end(os.path.join(folder, name), at) for name, at in zip(FILES, before, strict=True)]
    return EventCursor(at=before, end=(ends[0], ends[1]))


def _line_end(path: str, at: int) -> int:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while size > at:
            start = max(at, size - _READ)
            file.seek(start)
            last = file.read(size - start).rfind(b"\n")
            if last >= 0:
                return start + last + 1
            size = start
    return at


def part(folder: str, cursor: EventCursor) -> tuple[bytes, EventCursor | None]:
    """Return the next lines and the cursor after them, or None at the end."""
    paths = [os.path.join(folder, name) for name in FILES]
    begins = cursor.at == (0, 0) and cursor.since > 0
    at = [_skipped(path, cursor.since) for path in paths] if begins else cursor.at
    with contextlib.ExitStack() as open_:
        files = [_File(open_, *span) for span in zip(paths, at, cursor.end, strict=True)]
        lines: list[bytes] = []
        size = read = 0
        while size < PART and read < _READ:
            there = [file for file in files if file.line]
            if not there:
                return b"".join(lines), None
            # The start of the run comes first, although the first sample may have an earlier time (a whole second).
            first = there[0] if there[0] is files[0] and not files[0].at else min(there, key=lambda file: file.time)
            if first.time >= cursor.since and first.line.endswith(b"\n"):
                lines.append(first.line)
                size += len(first.line)
            read += len(first.line)
            first.step()
        return b"".join(lines), msgspec.structs.replace(cursor, at=(files[0].at, files[1].at))


def _skipped(path: str, since: float) -> int:
    """Return the start of a line before which all events are older than `since`. Reads only a few lines."""
    low = 0
    with contextlib.suppress(OSError), open(path, "rb") as file:
        high = os.fstat(file.fileno()).st_size
        while high - low > _READ:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline(_LONGEST)  # the rest of a line
            at, time = file.tell(), _time(file.read(_HEAD))
            if at < high and time is not None and time < since:
                low = at
            else:
                high = middle
    return low


def _time(line: bytes) -> float | None:
    """Return the time of an event, from its first bytes. None: the line is damaged."""
    found = _TIME.match(line[:_HEAD])
    return float(found[1]) if found is not None else None


class _File:
    """One of the files, at a line."""

    def __init__(self, open_: contextlib.ExitStack, path: str, at: int, end: int) -> None:
        self.at = at  # start of the line
        self.line = b""  # empty: no more
        self.time = 0.0
        self._end = end
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = open_.enter_context(open(path, "rb"))  # noqa: SIM115
            self._file.seek(at)
        self._next()

    def step(self) -> None:
        self.at += len(self.line)
        self._next()

    def _next(self) -> None:
        room = min(self._end - self.at, _LONGEST)
        self.line = self._file.readline(room) if self._file is not None and room > 0 else b""
        if len(self.line) < _LONGEST and not self.line.endswith(b"\n"):  # cut off by a full disk
            self.line = b""
        self.time = _time(self.line) or self.time
