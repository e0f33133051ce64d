"""The pipes of the ranks of one `phalanx.spawn`: their output and their results."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.launcher.spawn.output import RankOutput

logger = logging.getLogger(__name__)


@dataclass
class SpawnedRank:
    """What is known about a rank, and the read ends of its pipes."""

    ours: tuple[int, int, int]  # read ends: stdout, stderr, result
    stack: int  # the file for its stack
    pid: int = 0
    code: int | None = None  # None: it runs, or was stopped
    time: float = 0.0
    answer: bytearray = field(default_factory=bytearray)

    def result(self) -> dict[str, Any] | None:
        """Return the message that the rank sent at its end; None: nothing, or only a part of it."""
        try:
            # From a process that we have started, over a pipe that only it has.
            return dict(pickle.loads(self.answer)) if self.answer else None  # noqa: S301
        except Exception:  # of a truncated pickle: nearly anything
            logger.debug("the result of a rank cannot be read", exc_info=True)
            return None


class RankPipes:
    """Three pipes per rank: stdout, stderr and its result."""

    def __init__(self, ranks: int) -> None:
        self.open_ = contextlib.ExitStack()  # closed at the end
        self.ranks: list[SpawnedRank] = []
        self.waiting: list[tuple[int, int, int]] = []  # write ends of the ranks that have not been ordered
        self.nothing = -1  # /dev/null
        self._output = RankOutput(ranks)
        self._count = ranks

    def make(self) -> None:
        """Open the pipes. Raises OSError."""
        self.nothing = self._keep(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        for _ in range(self._count):
            self._add_rank()

    def close(self) -> None:
        """Close everything."""
        for fds in self.waiting:
            for fd in fds:
                os.close(fd)
        self.open_.close()

    def _keep(self, fd: int) -> int:
        self.open_.callback(os.close, fd)
        return fd

    def _add_rank(self) -> None:
        ours, theirs = [], []
        try:
            for _ in range(3):
                read, write = os.pipe()
                ours.append(self._keep(read))
                theirs.append(write)
                os.set_blocking(read, False)
            stack = self._keep(os.memfd_create("phalanx-stack"))
        except BaseException:
            for fd in theirs:
                os.close(fd)
            raise
        self.ranks.append(SpawnedRank((ours[0], ours[1], ours[2]), stack))
        self.waiting.append((theirs[0], theirs[1], theirs[2]))

    @contextlib.contextmanager
    def next_rank(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield the next rank to order, with the write ends of its pipes. They are closed here afterwards."""
        theirs = self.waiting.pop(0)
        try:
            yield len(self.ranks) - len(self.waiting) - 1, theirs
        finally:
            for fd in theirs:
                os.close(fd)

    def sources(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield each descriptor with (rank, 0 stdout, 1 stderr, 2 result)."""
        for rank, state in enumerate(self.ranks):
            for stream, fd in enumerate(state.ours):
                yield fd, (rank, stream)

    def take(self, data: bytes, rank: int, stream: int) -> None:
        """Show output of a rank, or add to its result."""
        if stream == 2:
            self.ranks[rank].answer += data
        else:
            self._output.show(data, rank, stream)

    def read_rest(self, fd: int, rank: int, stream: int) -> None:
        """Read the data that is in a pipe now."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, 1 << 16):
                self.take(data, rank, stream)

    def drop_noise(self) -> None:
        """Do not show what torch prints from now on about ranks and a store that it has lost: we end them."""
        self._output.drop_noise()

    def finish(self) -> None:
        """Read the remaining data in the pipes, and show incomplete lines."""
        for fd, (rank, stream) in self.sources():
            self.read_rest(fd, rank, stream)
        self._output.finish()
