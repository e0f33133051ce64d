"""What ranks have written, from their files: a part of it, or lines that are looked for. Bounded, whatever it is."""

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

PART = 1 << 16  # bytes of a log that are given at a time
LOOKED = 1 << 26  # bytes of one that are looked through, the newest
PATIENCE = 2.0  # seconds to do it in, for all of them
_BLOCK = 1 << 20
_LINE = 500  # bytes of a line that are shown
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_ATTEMPT = re.compile(r"attempt_(\d+)")


def part(folder: str | None, stream: Stream, start: int | None, size: int = PART) -> LogPart:
    """From there on, in whole characters; None: the end of it, from the beginning of a line."""
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
    """Without the beginning of a character whose end is still to come."""
    for back in range(1, min(4, len(data))):
        byte = data[-back]
        if byte >= 0xC0:
            return data[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else data
        if byte < 0x80:
            break
    return data


def search(folders: Mapping[int, str], text: str, most: int, *, patience: float = PATIENCE) -> list[SearchResult]:
    """Lines that have it, in capitals or not, the newest of each file. Those of rank -1 say what was left out."""
    looks = _Looks(text.encode().lower(), most, time.monotonic() + patience)
    files = [(rank, stream) for rank in sorted(folders) for stream in _STREAMS]
    found = [looks.into(os.path.join(folders[rank], f"{stream}.log"), rank, stream) for rank, stream in files]
    found = [lines for lines in found if lines]
    if sum(map(len, found)) > most:
        looks.left.add(f"only {most} lines are shown, of more")
        share = max(1, most // len(found))
        found = [lines[-share:] for lines in found]
    shown = [line for lines in found for line in lines][:most]
    return shown + [SearchResult(rank=-1, stream="stdout", at=0, line=why) for why in sorted(looks.left)]


class _Looks:
    def __init__(self, needle: bytes, most: int, end: float) -> None:
        self.left: set[str] = set()  # what was left out
        self._needle = needle
        self._most = most
        self._end = end

    def into(self, path: str, rank: int, stream: Stream) -> list[SearchResult]:
        try:
            file = open(path, "rb")  # noqa: SIM115
        except OSError:
            return []
        found: deque[SearchResult] = deque(maxlen=max(1, self._most))
        with file:
            length = os.fstat(file.fileno()).st_size
            at = max(0, length - LOOKED)
            if at:
                self.left.add(f"of rank {rank}, only the last {LOOKED >> 20} MiB were looked through")
            file.seek(at)
            rest = b""  # of a line that goes on in the next block
            while at < length:
                if time.monotonic() > self._end:
                    self.left.add(f"there was no time for all of it, beginning with rank {rank}")
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
    """Of each rank of the newest attempt, where it writes, or has written last."""
    newest = max((int(match[1]) for name in _names(run) if (match := _ATTEMPT.fullmatch(name))), default=None)
    if newest is None:
        return {}
    inside = os.path.join(run, f"attempt_{newest}")
    found: dict[int, tuple[float, str]] = {}
    for name in _names(inside):
        rank = name.partition(".")[0]  # of one that has taken the rank of one that lived: 3.1
        path = os.path.join(inside, name)
        if rank.isdigit() and os.path.isdir(path):
            found[int(rank)] = max(found.get(int(rank), (-1.0, "")), (_written(path), path))
    for number, path in _stood_in(run, newest).items():
        found[number] = max(found.get(number, (-1.0, "")), (_written(path), path))
    return {number: path for number, (_, path) in found.items()}


def _stood_in(run: str, attempt: int) -> dict[int, str]:
    """Workers that have another rank than at first, and spares that have one by now. They are numbered as they are
    started, which is the order they are born in."""
    inside = os.path.join(run, f"attempt_{attempt}")
    born: dict[int, str] = {}  # pid -> folder
    seated: dict[int, str] = {}
    with contextlib.suppress(OSError), open(os.path.join(run, "events.jsonl"), "rb") as file:
        for line in file:
            if b'"worker-started"' not in line[:40] and b'"rank-changed"' not in line[:40]:
                continue
            with contextlib.suppress(msgspec.MsgspecError):
                match events.decode(line):
                    case events.WorkerStarted() as event if event.attempt == attempt:
                        name = f"spare.{len(born)}" if event.spare else str(event.rank)
                        born[event.pid] = os.path.join(inside, name)
                    case events.RankChanged() as event if os.path.isdir(born.get(event.pid, "")):
                        seated[event.rank] = born[event.pid]
    return seated


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
