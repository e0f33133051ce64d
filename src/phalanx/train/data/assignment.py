"""How the samples of a step are divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.train.data.order import Position, Tail


@dataclass(slots=True)
class AssignedBatch:
    """One rank's batch: `size` samples, of which the first `count` are not padding; `total` of all ranks."""

    batch: Any
    count: int
    size: int
    total: int
    next: Position


@dataclass(frozen=True)
class BatchAssignment:
    """How a step is divided: the batch size of every rank, this rank, and what happens to the last samples."""

    batches: tuple[int, ...]
    rank: int
    tail: Tail

    @property
    def batch(self) -> int:
        """The batch size of this rank."""
        return self.batches[self.rank]


@dataclass(frozen=True)
class Parted:
    """How an epoch was divided into shards, up to where another number of ranks resumed it."""

    batches: tuple[int, ...]
    workers: int  # of each rank
    tail: Tail
    steps: int
    consumed: int
