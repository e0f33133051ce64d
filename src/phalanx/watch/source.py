"""Where it comes from: the agent of a run that lives, or the folder of one that has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from phalanx.contract.events import AnyEvent

Stream = Literal["stdout", "stderr"]


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """Of what a rank has written: bytes `start` to `end` of its file."""

    start: int
    end: int
    text: str


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line that was looked for."""

    rank: int
    stream: Stream
    at: int  # where it begins in the file
    line: str


class WhyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing goes on, or that something does."""

    report: str
    verdicts: tuple[str, ...] = ()
    stacks: dict[int, str] = {}  # by rank


class Source(Protocol):
    run: str  # its name

    @property
    def alive(self) -> bool: ...

    def events(self) -> AsyncIterator[AnyEvent]:
        """What has happened, in order; then, of a run that lives, what happens. Ends with the run."""
        ...

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = 1 << 16) -> LogPart:
        """From there on; None: the end of it."""
        ...

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]: ...

    async def why(self) -> WhyAnswer:
        """With all stacks."""
        ...
