"""The output of all workers of a run, from the files of all nodes on this disk: attempts, ranks, whole lines.

The files have no times, so lines of different ranks have no order among them; those of one stream do.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from phalanx.contract import events
from phalanx.launcher.output import log_reader

STREAMS = ("stdout", "stderr")
_BLOCK = 1 << 16  # bytes read at once
_LONGEST = 1 << 20  # bytes of a line, which is then broken
_ATTEMPT = re.compile(r"attempt_(\d+)")
_WORKER = re.compile(r"(\d+)(?:\.(\d+))?")  # a replacement has a suffix: 3.1
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|\x9b[0-?]*[ -/]*[@-~]", re.DOTALL
)


@dataclass(frozen=True, order=True)
class WorkerLog:
    """The folder with the output of one worker."""

    attempt: int
    rank: int
    generation: int  # 0: the first worker of this rank; else that of its replacement
    folder: str


def find(folder: str) -> list[WorkerLog]:
    """Return the logs of a run that are on this disk, by attempt, then rank, then generation."""
    found: dict[str, WorkerLog] = {}
    for part in (folder, *glob.glob(os.path.join(glob.escape(folder), "node_*"))):
        for name in _names(part):
            match = _ATTEMPT.fullmatch(name)
            if match is None:
                continue
            attempt = int(match[1])
            for worker in _names(os.path.join(part, name)):
                path = os.path.join(part, name, worker)
                if label := _WORKER.fullmatch(worker):
                    found[path] = WorkerLog(attempt, int(label[1]), int(label[2] or 0), path)
            for rank, path in log_reader.spares_with_rank(part, attempt).items():
                found[path] = WorkerLog(attempt, rank, 0, path)
    return sorted(found.values())


class KnownRanks:
    """The ranks that the events of a run name, on any host."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "events.jsonl")
        self._at = 0
        self._found: set[int] = set()

    def read(self) -> set[int]:
        """Return all ranks so far."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                if b'"ranks"' in line[:40]:
                    with contextlib.suppress(msgspec.MsgspecError):
                        event = events.decode(line)
                        if isinstance(event, events.RankInfos):
                            self._found |= {info.rank for _, info in event.each()}
        return self._found


class LineReader:
    """Cuts the growing output of a stream into whole lines that are safe for a terminal."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield harmless(line)
        if len(self._rest) >= _LONGEST:
            yield from self.end()

    def end(self) -> Iterator[str]:
        """Yield the last line, if it has no end."""
        if self._rest:
            yield harmless(self._rest)
            self._rest = b""


class LogFile:
    """One stream of one worker, read from a position on. `tail`: only the last lines that are there now."""

    def __init__(self, log: WorkerLog, stream: str, *, tail: int | None = None) -> None:
        self.log = log
        self._path = os.path.join(log.folder, f"{stream}.log")
        self._lines = LineReader()
        self._at = 0 if tail is None else start_of_tail(self._path, tail)

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that were written since the last call."""
        with contextlib.suppress(OSError):
            size = os.stat(self._path).st_size
            if size < self._at:  # it was truncated
                yield from self._lines.end()
                self._at = 0
            if size == self._at:
                return
            yield from self._read()

    def _read(self) -> Iterator[str]:
        with open(self._path, "rb") as file:
            file.seek(self._at)
            while data := file.read(_BLOCK):
                self._at += len(data)
                yield from self._lines.feed(data)

    def last_line(self) -> Iterator[str]:
        """Yield the last line, if it has no end: nothing follows it."""
        yield from self._lines.end()


def start_of_tail(path: str, lines: int) -> int:
    """Return where the last lines of a file begin."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size = at = os.fstat(file.fileno()).st_size
        if lines <= 0:
            return size
        ends = 0
        while at > 0:
            start = max(0, at - _BLOCK)
            file.seek(start)
            block = file.read(at - start)
            place = len(block)
            while (place := block.rfind(b"\n", 0, place)) >= 0:
                ends += start + place + 1 < size  # the end of the last line is not between two
                if ends == lines:
                    return start + place + 1
            at = start
    return 0


def harmless(line: bytes) -> str:
    """Return a line in its final form, without escapes and control characters that a terminal interprets."""
    text = line.decode(errors="replace")
    if text.isprintable():
        return text
    text = next((part for part in reversed(text.split("\r")) if part), "")  # progress bars overwrite themselves
    text = _ESCAPE.sub("", text)
    return "".join(char if char.isprintable() or char == "\t" else " " for char in text if char not in "\x07\x08\x7f")


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []
