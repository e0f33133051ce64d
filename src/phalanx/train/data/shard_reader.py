"""Reads an iterable data set in a DataLoader worker: the elements of its part, as whole batches with their counts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from phalanx.train.data import rng
from phalanx.train.data.assignment import BatchAssignment, Parted
from phalanx.train.data.order import Position, share


def is_stateful(dataset: Any) -> bool:
    """Return whether it has state_dict and load_state_dict."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


class Elements:
    """A data set that is being read."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._numbers = rng.RngState(seed)
        self.ended = False
        with self._reading():
            self._iterator: Any = iter(dataset)

    def take(self, number: int) -> list[Any]:
        """Return this many elements, or the remaining ones."""
        if self.ended:
            return []
        with self._reading():
            taken = list(islice(self._iterator, number))
        self.ended = len(taken) < number
        return taken

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        # Hide the worker: a data set that divides itself by it, as in torch's documentation, would divide twice.
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            with self._numbers.drawn():
                yield
        finally:
            torch_worker._worker_info = info

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data set and of its random numbers."""
        teller = self._iterator if is_stateful(self._iterator) else self._dataset
        return {"ended": self.ended, "numbers": self._numbers.state_dict(), "data": teller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the elements that were read before `state` was saved."""
        # At its end a data set may be at its start again, so the end is saved separately.
        self.ended = state["ended"]
        self._numbers.load_state_dict(state["numbers"])
        if is_stateful(self._iterator):
            self._iterator.load_state_dict(state["data"])
        else:
            self._dataset.load_state_dict(state["data"])
            with self._reading():
                self._iterator = iter(self._dataset)


class RestOfEpoch:
    """The rest of an epoch that was divided into shards: all shards, without the elements that were read."""

    def __init__(self, dataset: Any, parted: Parted, seed: int) -> None:
        self.dataset = dataset
        self.parted = parted
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as for the data set itself."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        batches, workers = self.parted.batches, self.parted.workers
        for rank, batch in enumerate(batches):
            parts = deque(
                _part(self.dataset, rank * workers + worker, len(batches) * workers, self.seed, self.epoch)
                for worker in range(workers)
            )
            # Like a DataLoader: one batch per worker in turn, without those that have ended.
            done = 0
            while parts and done < self.parted.steps:
                taken = len(parts[0].take(batch))
                if taken < (batch if self.parted.tail == "drop" else 1):
                    parts.popleft()
                else:
                    parts.rotate(-1)
                    done += 1
            for part in parts:
                while samples := part.take(batch):
                    yield from samples


def _part(dataset: Any, index: int, count: int, seed: int, epoch: int) -> Elements:
    return Elements(dataset.shard(index=index, count=count), rng.number(seed, epoch, index))


@dataclass(eq=False)
class BatchSource(IterableDataset):  # type: ignore[misc]
    """The data set of the DataLoader: whole batches with their counts."""

    reader: type[PartReader]
    dataset: Any
    assignment: BatchAssignment
    position: Position
    start: int
    seed: int

    def __iter__(self) -> PartReader:
        return self.reader(self, get_worker_info())


class PartReader:
    """Reads the data set in one worker."""

    def __init__(self, source: BatchSource, worker: Any) -> None:
        self.assignment = source.assignment
        self.position = source.position
        self.seed = source.seed
        self.apart = worker is not None  # in a worker process
        self.worker: int = worker.id if worker else 0
        self.workers: int = worker.num_workers if worker else 1
        self.elements = self.open(source.dataset)
        self.read = source.start
        self.place = source.position.consumed + self.worker * sum(self.assignment.batches)

    def open(self, dataset: Any) -> Elements:
        """Return the elements of the data set that this worker reads."""
        raise NotImplementedError

    def __iter__(self) -> PartReader:
        return self

    def __next__(self) -> tuple[list[Any], int, int, int]:
        raise NotImplementedError

    def take(self, number: int) -> list[Any]:
        """Return this many elements, or the remaining ones, and count them."""
        taken = self.elements.take(number)
        self.read += len(taken)
        return taken

    def seed_batch(self, reader: int) -> None:
        """Seed the generators for collating a batch, except in the training process, which has seeded its own."""
        if self.apart:
            rng.seed(rng.number(self.seed, self.position.epoch, reader, self.read))

    # torchdata's StatefulDataLoader calls these, in the worker.
    def state_dict(self) -> dict[str, Any]:
        """Return the position of this worker."""
        return {"read": self.read, "place": self.place, **self.elements.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of the worker that `state` comes from."""
        self.read, self.place = state["read"], state["place"]
        self.elements.load_state_dict(state)


class StreamReader(PartReader):
    """Takes the batches of all ranks for a step from the stream; the workers of a rank take the steps in turn."""

    def open(self, dataset: Any) -> Elements:
        """Return all elements: every worker of every rank reads them."""
        self._ahead: list[Any] = []  # read, but not returned yet
        return Elements(dataset, rng.number(self.seed, self.position.epoch))

    def __next__(self) -> tuple[list[Any], int, int, int]:
        whole = sum(self.assignment.batches)
        # The last full step of an evaluation includes the rest, if that is not enough for all ranks.
        extra = len(self.assignment.batches) if self.assignment.tail == "every" else 0
        del self._ahead[: max(0, self.place - (self.read - len(self._ahead)))]
        while self.read < self.place:
            if not self.take(min(whole, self.place - self.read)):
                raise StopIteration
        block, self._ahead = self._ahead + self.take(whole + extra - len(self._ahead)), []
        here = Position(self.position.epoch, self.place)
        step = share(here, self.place + len(block), self.assignment.batches, self.assignment.tail)
        if step is None or not step.sizes[self.assignment.rank]:
            raise StopIteration
        self._ahead = block[step.total :]
        self.seed_batch(self.assignment.rank)
        self.place += whole * self.workers
        start = sum(step.counts[: self.assignment.rank])
        count, size = step.counts[self.assignment.rank], step.sizes[self.assignment.rank]
        return block[start : start + count] + block[:1] * (size - count), count, size, step.total


class ShardReader(PartReader):
    """Reads a shard, one batch after the other."""

    def open(self, dataset: Any) -> Elements:
        """Return the elements of this worker's shard."""
        self.index = self.assignment.rank * self.workers + self.worker
        return _part(dataset, self.index, len(self.assignment.batches) * self.workers, self.seed, self.position.epoch)

    def __next__(self) -> tuple[list[Any], int, int, int]:
        batch = self.assignment.batch
        samples = self.take(batch)
        count = len(samples)
        if not count or (self.assignment.tail == "drop" and count < batch):
            raise StopIteration
        self.seed_batch(self.index)
        if self.assignment.tail == "pad":
            samples += samples[:1] * (batch - count)
        return samples, count, len(samples), 0


class CollateSamples:
    """Collates the samples, and passes the counts through."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate or default_collate

    def __call__(self, divided: tuple[list[Any], int, int, int]) -> tuple[Any, int, int, int]:
        """Return the batch and its counts."""
        samples, *counts = divided
        return (self.collate(samples), *counts)
