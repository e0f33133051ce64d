"""The end of the output of the selected rank."""

from __future__ import annotations

from collections import deque

from phalanx.errors import PhalanxError
from phalanx.watch.screen.terminal import text
from phalanx.watch.source import LogPart, Source, Stream

_KEPT = 2000  # lines
_LONGEST = 2000  # characters of a line
_MUCH = 1 << 15  # bytes from which there may be more


class Tail:
    """Follows one stream of one rank, and scrolls within the kept lines."""

    def __init__(self) -> None:
        self.rank = -1
        self.stream: Stream = "stdout"
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self.came = 0  # lines received so far, for a stable scroll position
        self.back = 0  # lines scrolled back
        self.error = ""
        self._end: int | None = None
        self._open = ""  # the unfinished line

    def switch(self, rank: int, stream: Stream) -> None:
        """Switch to another rank or stream."""
        if (rank, stream) != (self.rank, self.stream):
            self.rank, self.stream, self.error = rank, stream, ""
            self._begin()

    def _begin(self) -> None:
        self.lines.clear()
        self.came, self._end, self._open = 0, None, ""

    def scroll(self, key: str) -> None:
        """Handle a key that scrolls."""
        back = self.back + {"up": 1, "down": -1, "page up": 20, "page down": -20}.get(key, 0)
        most = len(self.lines) - 1
        self.back = most if key == "home" else 0 if key == "end" else max(0, min(back, most))

    async def update(self, source: Source) -> bool:
        """Read new output and keep the scroll position. Return whether there is something new to show."""
        before = self.came
        try:
            new = await self.read(source, whole=self.back > 0)
        except (PhalanxError, OSError) as error:
            new, self.error = self.error != str(error), str(error)
            return new
        if self.back:
            self.back = max(0, min(self.back + self.came - before, len(self.lines) - 1))
        self.error = ""
        return new

    async def read(self, source: Source, *, whole: bool = False) -> bool:
        """Read new output. Return whether there is something new to show.

        If a rank writes faster than this reads, the middle is skipped; `whole`: read all of it.
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
        if (rank, stream, start) != (self.rank, self.stream, self._end):  # switched meanwhile
            return False
        if skips:
            self._begin()
        return self.take(part)

    def take(self, part: LogPart) -> bool:
        """Add a part of the output. Return whether there is something new to show."""
        if self._end is not None and part.start != self._end:  # another file: the next attempt or worker
            self._begin()
            self._end = None
            return True
        first, self._end = self._end is None, part.end
        if not part.text:
            return first
        finished = (self._open + part.text).split("\n")
        if first and part.start > 0:  # probably the middle of a line
            finished = finished[1:] or finished
        self._open = finished.pop()[-_LONGEST:] if finished else ""
        self.lines.extend(text.shown(line.removesuffix("\r")[-_LONGEST:]) for line in finished)
        self.came += len(finished)
        return True

    @property
    def shown(self) -> list[str]:
        """All lines, the unfinished one last."""
        unfinished = text.shown(self._open)
        return [*self.lines, unfinished] if unfinished else list(self.lines)
