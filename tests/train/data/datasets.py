"""Data sets that the loader tests read: with an index, as a stream, in shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class Numbers:
    """A data set with an index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):  # type: ignore[misc]
    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()  # as torch's manual deals
        yield from range(worker.id, self.length, worker.num_workers) if worker else range(self.length)


class StatefulStream(Stream):
    """Has a state, and resumes from it: nothing is read twice."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0
        self.began = 0

    def __iter__(self) -> Iterator[int]:
        self.began = self.at
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Shards(Stream):
    """Shard 0 has most of the samples, and the last shards may have none."""

    def __init__(self, length: int, index: int = 0, count: int = 1) -> None:
        super().__init__(length)
        self.index, self.count = index, count

    def shard(self, index: int, count: int) -> Shards:
        return Shards(self.length, index, count)

    def __iter__(self) -> Iterator[int]:
        cut = self.length * 3 // 5 if self.count > 1 else self.length
        yield from range(cut) if not self.index else range(cut + self.index - 1, self.length, max(1, self.count - 1))
