"""Which streams of which ranks are shown, and which lines are duplicated: torchrun's options and ours."""

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
    """A choice of streams, for all ranks or by local rank."""

    every: Std = Std.NONE
    by_local_rank: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> dict[int, Std]:
        """Return the streams of one local rank."""
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
    """Return the streams of a rank that the console shows: those not redirected or teed, unless filtered out."""
    if local_ranks and local_rank not in local_ranks:  # torchrun's default is "": no filter
        return Std.NONE
    if ranks and rank not in ranks:
        return Std.NONE
    only_in_file = redirects.get(local_rank, Std.NONE) & ~tee.get(local_rank, Std.NONE)
    return Std.ALL & ~only_in_file


def duplicated(local_rank: int, *, tee: Mapping[int, Std], local_ranks: Collection[int] | None = None) -> Std:
    """Return the streams of a rank that are searched for needles: as in torchrun, those teed and not filtered out."""
    if local_ranks and local_rank not in local_ranks:
        return Std.NONE
    return tee.get(local_rank, Std.NONE)


class Duplicate:
    """Selects the lines of a stream that contain a needle, and prefixes them with a header.

    A carriage return ends a line too, as in torchrun, which reads logs with universal newlines: otherwise a progress
    bar would be one line for hours.
    """

    def __init__(self, needles: Collection[str], header: str) -> None:
        self._needles = [needle.encode() for needle in needles]
        self._header = header.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the selected lines of the next bytes."""
        data = self._rest + data
        if b"\r" in data:
            kept = b"\r" if data.endswith(b"\r") else b""  # the newline may follow
            data = data[: len(data) - len(kept)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + kept
        whole, newline, self._rest = data.rpartition(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole, newline, self._rest = data, b"\n", b""
        return self._matching(whole) if newline else b""

    def end(self) -> bytes:
        """Return the last line, if it is selected."""
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
