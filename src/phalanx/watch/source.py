"""Sources from which a viewer reads a run: the agent of a live run, or the directory of a finished one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from phalanx.contract.events import AnyEvent

Stream = Literal["stdout", "stderr"]


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the output of a rank: bytes `start` to `end` of its file."""

    start: int
    end: int
    text: str


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line that matches a search."""

    rank: int
    stream: Stream
    at: int  # offset of the line in the file
    line: str


class WhyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `why`: verdicts about a stall, and the stacks of all ranks."""

    report: str
    verdicts: tuple[str, ...] = ()
    stacks: dict[int, str] = {}  # by rank


class Source(Protocol):
    """The data that a viewer requests."""

    run: str  # its name

    @property
    def alive(self) -> bool:
        """Whether the run is still running."""
        ...

    def events(self) -> AsyncIterator[AnyEvent]:
        """Yield all events so far, then, for a live run, the new ones. Ends with the run."""
        ...

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = 1 << 16) -> LogPart:
        """Return part of the output of a rank, beginning at `start`. None: the end of the output."""
        ...

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        """Return the lines that contain `text`, at most `most`."""
        ...

    async def why(self) -> WhyAnswer:
        """Explain why the run is stalled, with the stacks of all ranks."""
        ...
