"""The position of a loader in its data: what was read, what is committed, and where a resumed run continues."""

from __future__ import annotations

from typing import Any

from phalanx.train.data.assignment import Parted
from phalanx.train.data.order import Position


class LoaderCursor:
    """The position of a loader. A position includes the number of steps of its epoch."""

    def __init__(self) -> None:
        self.go_to(Position())

    def go_to(self, position: Position, done: int = 0) -> None:
        """Go to a position, `done` steps into its epoch. The state of the workers there is unknown."""
        self.committed = self.taken = (position, done)
        self.finished = False  # the last batch of the epoch was read
        self.resume: dict[str, Any] | None = None  # the state of the workers, until they are started
        self.parted: Parted | None = None  # how other ranks have divided the epoch so far

    def start(self) -> tuple[Position, int, dict[str, Any] | None]:
        """Return the committed position, and the state to start the workers with. Goes to the next epoch if the last
        one is finished.
        """
        if self.finished:
            self.go_to(Position(self.committed[0].epoch + 1))
        self.taken = self.committed
        resume, self.resume = self.resume, None
        return (*self.committed, resume)

    def advance(self, position: Position) -> None:
        """Record that the batch before this position was read."""
        self.taken = (position, self.taken[1] + 1)

    def commit(self) -> None:
        """Commit all batches that were read so far."""
        self.committed = self.taken

    @property
    def workers_at_commit(self) -> bool:
        """Whether the workers are at the position of the last commit, in the middle of an epoch."""
        return self.taken == self.committed and self.committed[1] > 0 and not self.finished
