"""Reads and searches the logs of ranks, with limits on size and time."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from phalanx.contract import events
from phalanx.watch.source import LogPart, SearchResult, Stream

PART = 1 << 16  # bytes returned at a time
SEARCHED = 1 << 26  # bytes per log that are searched, the newest
TIMEOUT = 2.0  # seconds for a search in all logs
_BLOCK = 1 << 20
_LINE = 500  # bytes of a line that are shown
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_ATTEMPT = re.compile(r"attempt_(\d+)")


def part(folder: str | None, stream: Stream, start: int | None, size: int = PART) -> LogPart:
    """Return a part of a log in whole characters, from `start`. None: the end of it, from the start of a line."""
    size = max(1, min(size, PART))
    if folder is None:
        return LogPart(start=0, end=0, text="")
    with contextlib.suppress(OSError), open(os.path.join(folder, f"{stream}.log"), "rb") as file:
        length = os.fstat(file.fileno()).st_size
        first = min(start, length) if start is not None else max(0, length - size)
        file.seek(first)
        data = file.read(size)
        if start is None and first:
            cut = data.find(b"\n") + 1
            first, data = first + cut, data[cut:]
        data = _whole(data)
        return LogPart(start=first, end=first + len(data), text=data.decode(errors="replace"))
    return LogPart(start=0, end=0, text="")


def _whole(data: bytes) -> bytes:
    """Remove an incomplete character at the end."""
    for back in range(1, min(4, len(data))):
        byte = data[-back]
        if byte >= 0xC0:
            return data[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else data
        if byte < 0x80:
            break
    return data


def search(folders: Mapping[int, str], text: str, most: int, *, timeout: float = TIMEOUT) -> list[SearchResult]:
    """Return lines that contain a text, ignoring case, the newest of each log. Rank -1: notes about omitted parts."""
    searcher = _Searcher(text.encode().lower(), most, time.monotonic() + timeout)
    files = [(rank, stream) for rank in sorted(folders) for stream in _STREAMS]
    found = [searcher.search(os.path.join(folders[rank], f"{stream}.log"), rank, stream) for rank, stream in files]
    found = [lines for lines in found if lines]
    if sum(map(len, found)) > most:
        searcher.notes.add(f"only {most} lines are shown, of more")
        share = max(1, most // len(found))
        found = [lines[-share:] for lines in found]
    shown = [line for lines in found for line in lines][:most]
    return shown + [SearchResult(rank=-1, stream="stdout", at=0, line=why) for why in sorted(searcher.notes)]


class _Searcher:
    def __init__(self, needle: bytes, most: int, end: float) -> None:
        self.notes: set[str] = set()  # about omitted parts
        self._needle = needle
        self._most = most
        self._end = end

    def search(self, path: str, rank: int, stream: Stream) -> list[SearchResult]:
        try:
            file = open(path, "rb")  # noqa: SIM115
        except OSError:
            return []
        found: deque[SearchResult] = deque(maxlen=max(1, self._most))
        with file:
            length = os.fstat(file.fileno()).st_size
            at = max(0, length - SEARCHED)
            if at:
                self.notes.add(f"only the last {SEARCHED >> 20} MiB of rank {rank} were searched")
            file.seek(at)
            rest = b""  # start of a line that ends in the next block
            while at < length:
                if time.monotonic() > self._end:
                    self.notes.add(f"the search timed out at rank {rank}")
                    break
                block = file.read(min(_BLOCK, length - at))
                if not block:
                    break
                data, base = rest + block, at - len(rest)
                at += len(block)
                cut = data.rfind(b"\n") + 1 if at < length else len(data)
                if cut == 0 and len(data) > _BLOCK:
                    cut = len(data)
                rest = data[cut:]
                found.extend(
                    SearchResult(rank=rank, stream=stream, at=base + start, line=line.decode(errors="replace"))
                    for start, line in self._hits(data[:cut])
                )
        return list(found)

    def _hits(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        low, place = data.lower(), 0
        while (hit := low.find(self._needle, place)) >= 0:
            start, stop = data.rfind(b"\n", 0, hit) + 1, data.find(b"\n", hit)
            stop = len(data) if stop < 0 else stop
            first = start if hit - start < _LINE else hit
            yield start, data[first : min(stop, first + _LINE)]
            place = stop + 1


def folders(run: str) -> dict[int, str]:
    """Return the folder of each rank in the newest attempt."""
    newest = max((int(match[1]) for name in _names(run) if (match := _ATTEMPT.fullmatch(name))), default=None)
    if newest is None:
        return {}
    inside = os.path.join(run, f"attempt_{newest}")
    found: dict[int, tuple[float, str]] = {}
    for name in _names(inside):
        rank = name.partition(".")[0]  # a replacement has a suffix: 3.1
        path = os.path.join(inside, name)
        if rank.isdigit() and os.path.isdir(path):
            found[int(rank)] = max(found.get(int(rank), (-1.0, "")), (_written(path), path))
    for number, path in _reassigned(run, newest).items():
        found[number] = max(found.get(number, (-1.0, "")), (_written(path), path))
    return {number: path for number, (_, path) in found.items()}


def _reassigned(run: str, attempt: int) -> dict[int, str]:
    """Return the folders of workers whose rank changed, and of spares that got one. Spares are numbered by start."""
    inside = os.path.join(run, f"attempt_{attempt}")
    folders_by_pid: dict[int, str] = {}  # pid -> folder
    seated: dict[int, str] = {}
    with contextlib.suppress(OSError), open(os.path.join(run, "events.jsonl"), "rb") as file:
        for line in file:
            if b'"worker-started"' not in line[:40] and b'"rank-changed"' not in line[:40]:
                continue
            with contextlib.suppress(msgspec.MsgspecError):
                match events.decode(line):
                    case events.WorkerStarted() as event if event.attempt == attempt:
                        name = f"spare.{len(folders_by_pid)}" if event.spare else str(event.rank)
                        folders_by_pid[event.pid] = os.path.join(inside, name)
                    case events.RankChanged() as event if os.path.isdir(folders_by_pid.get(event.pid, "")):
                        seated[event.rank] = folders_by_pid[event.pid]
    return seated


def spares_with_rank(run: str, attempt: int) -> dict[int, str]:
    """Return the folders of spares that got a rank during an attempt."""
    found = _reassigned(run, attempt)
    return {rank: path for rank, path in found.items() if os.path.basename(path).startswith("spare.")}


def _written(folder: str) -> float:
    times = [0.0]
    for stream in _STREAMS:
        with contextlib.suppress(OSError):
            times.append(os.stat(os.path.join(folder, f"{stream}.log")).st_mtime)
    return max(times)


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []
