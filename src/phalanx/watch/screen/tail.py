"""The end of what the chosen rank has written, followed as it grows."""

from __future__ import annotations

from collections import deque

from phalanx.watch.screen import text
from phalanx.watch.source import LogPart, Source, Stream

_KEPT = 2000  # lines
_LONGEST = 2000  # characters of a line that nobody ends
_MUCH = 1 << 15  # bytes between two looks: there may be more than one look gives


class Tail:
    def __init__(self) -> None:
        self.rank = -1
        self.stream: Stream = "stdout"
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self.came = 0  # lines, ever: who has scrolled back stays where he is
        self.trouble = ""
        self._end: int | None = None
        self._open = ""  # a line that is not finished

    def turn(self, rank: int, stream: Stream) -> None:
        """To another one."""
        if (rank, stream) != (self.rank, self.stream):
            self.rank, self.stream, self.trouble = rank, stream, ""
            self._begin()

    def _begin(self) -> None:
        self.lines.clear()
        self.came, self._end, self._open = 0, None, ""

    async def read(self, source: Source, *, whole: bool = False) -> bool:
        """What has come since. True: there is something else to show now.

        A rank that writes faster than it is read here is seen as it is now, and what lies between is left out; `whole`:
        somebody reads it.
        """
        rank, stream, start = self.rank, self.stream, self._end
        if rank < 0:
            return False
        part = await source.log(rank, stream, start=start)
        skips = False
        if start is not None and part.end - part.start >= _MUCH and not whole:
            newest = await source.log(rank, stream)
            skips = newest.end > part.end
            part = newest if skips else part
        if (rank, stream, start) != (self.rank, self.stream, self._end):  # turned away meanwhile
            return False
        if skips:
            self._begin()
        return self.take(part)

    def take(self, part: LogPart) -> bool:
        if self._end is not None and part.start != self._end:  # another file: of the next attempt, or the next worker
            self._begin()
            self._end = None
            return True
        first, self._end = self._end is None, part.end
        if not part.text:
            return first
        finished = (self._open + part.text).split("\n")
        if first and part.start > 0:  # most likely the middle of a line
            finished = finished[1:] or finished
        self._open = finished.pop()[-_LONGEST:] if finished else ""
        self.lines.extend(text.shown(line.removesuffix("\r")[-_LONGEST:]) for line in finished)
        self.came += len(finished)
        return True

    @property
    def shown(self) -> list[str]:
        """All lines that are kept; the one that is not finished is the last."""
        unfinished = text.shown(self._open)
        return [*self.lines, unfinished] if unfinished else list(self.lines)
