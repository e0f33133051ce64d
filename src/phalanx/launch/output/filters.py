"""Which stream of which rank is shown, and which lines are kept twice: torchrun's options, and ours."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LONGEST_LINE = 1 << 20


class Std(enum.IntFlag):
    """The streams of a worker. The numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR


@dataclass(frozen=True)
class Streams:
    """Which streams of each worker: one choice for all, or one per local rank."""

    every: Std = Std.NONE
    by_local_rank: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> dict[int, Std]:
        return {local_rank: self.by_local_rank.get(local_rank, self.every)}


def shown(
    local_rank: int,
    rank: int,
    *,
    redirects: Mapping[int, Std],
    tee: Mapping[int, Std],
    local_ranks: Collection[int] | None = None,
    ranks: Collection[int] | None = None,
) -> Std:
    """What of a rank is on the console: what is not redirected, or is teed; nothing if it is filtered out."""
    if local_ranks and local_rank not in local_ranks:  # an empty filter is none: torchrun's default is ""
        return Std.NONE
    if ranks and rank not in ranks:
        return Std.NONE
    only_in_file = redirects.get(local_rank, Std.NONE) & ~tee.get(local_rank, Std.NONE)
    return Std.ALL & ~only_in_file


def duplicated(local_rank: int, *, tee: Mapping[int, Std], local_ranks: Collection[int] | None = None) -> Std:
    """What of a rank is searched for needles: as in torchrun, what is teed and not filtered out."""
    if local_ranks and local_rank not in local_ranks:
        return Std.NONE
    return tee.get(local_rank, Std.NONE)


class Duplicate:
    """Bytes of one stream in; out come the lines that contain a needle, each behind its header.

    A carriage return ends a line as well, as it does for torchrun, which reads the logs with universal
    newlines: a progress bar would otherwise be one line for hours.
    """

    def __init__(self, needles: Collection[str], header: str) -> None:
        self._needles = [needle.encode() for needle in needles]
        self._header = header.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data
        if b"\r" in data:
            kept = b"\r" if data.endswith(b"\r") else b""  # the newline may be still to come
            data = data[: len(data) - len(kept)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + kept
        whole, newline, self._rest = data.rpartition(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole, newline, self._rest = data, b"\n", b""
        return self._matching(whole) if newline else b""

    def end(self) -> bytes:
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return self._matching(rest) if rest else b""

    def _matching(self, lines: bytes) -> bytes:
        if not any(needle in lines for needle in self._needles):  # nearly always, and at the speed of memchr
            return b""
        return b"".join(
            self._header + line + b"\n"
            for line in lines.split(b"\n")
            if any(needle in line for needle in self._needles)
        )
