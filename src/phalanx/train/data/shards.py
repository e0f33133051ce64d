"""Iterable data sets: which worker of which rank reads which part.

There are two ways, and the data set decides:

- `ShardStream`: any iterable. Every DataLoader worker of every rank reads all of it and keeps its own part, as with a
  data set that has an index. It costs reading but no communication, and it can be resumed with any number of ranks.
  Every rank must get the same elements in the same order.
- `Shards`: a data set with a method `shard(index, count)`. Every worker of every rank reads its own shard. The length
  of shards is not known, so all ranks agree on every step: one all_reduce of one number on the CPU. When an epoch is
  resumed with another number of ranks, the rest of it is read as a stream.

If a data set has a state, torchdata's StatefulDataLoader saves it. A checkpoint has the state of rank 0: in a stream
all ranks resume from it, with shards only rank 0 does; the others read their shards again and skip what was consumed.

A data set draws from separate random numbers while it is read (`rng.RngState`): one that shuffles without a seed comes
in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from phalanx.train.data import rng
from phalanx.train.data.order import Last, Position, share


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
    last: Last

    @property
    def batch(self) -> int:
        """The batch size of this rank."""
        return self.batches[self.rank]


@dataclass(frozen=True)
class Parted:
    """How an epoch was divided into shards, up to where another number of ranks resumed it."""

    batches: tuple[int, ...]
    workers: int  # of each rank
    last: Last
    steps: int
    consumed: int


def is_stateful(dataset: Any) -> bool:
    """Return whether it has state_dict and load_state_dict."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def can_shard(dataset: Any) -> bool:
    """Return whether it has `shard(index, count)`. Other libraries have `shard(num_shards, index)`."""
    method = getattr(dataset, "shard", None)
    return callable(method) and {"index", "count"} <= set(inspect.signature(method).parameters)


class _Feed:
    """What both ways have in common: a DataLoader for each time the data set is read."""

    kind = ""

    def __init__(self, dataset: Any, deal: BatchAssignment, options: dict[str, Any], seed: int) -> None:
        self._dataset = dataset
        self._deal = deal
        self._options = options
        self._seed = seed
        self._loader: Any = None
        self._exhausted = False
        self._start: Any = None

    def open(self, position: Position, steps: int, state: dict[str, Any] | None) -> Iterator[AssignedBatch]:
        """Read from `position` on, `steps` into the epoch; directly, if `state` is a snapshot of that position."""
        self._rewind(position.epoch)
        self._exhausted = False
        self._loader = _loader(self._source(position), self._options, state)
        return self._read_out(self._read(position, 0 if state else steps), self._loader)

    def _read_out(self, batches: Iterator[AssignedBatch], loader: Any) -> Iterator[AssignedBatch]:
        try:
            yield from batches
        finally:
            if self._loader is loader:
                self._loader = None  # torchdata's keeps its workers when a loop is left

    def _rewind(self, epoch: int) -> None:
        """Reset a stateful data set to its start: it would continue where it was read to."""
        if self._start is not None and not self._exhausted:
            self._dataset.load_state_dict(self._start)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if is_stateful(self._dataset):
            self._start = copy.deepcopy(self._dataset.state_dict())

    def snapshot(self) -> dict[str, Any] | None:
        """Return the state of the workers, if the data set has one and torchdata is installed."""
        return self._loader.state_dict() if is_stateful(self._loader) and not self._exhausted else None

    def _source(self, position: Position) -> _Source:
        raise NotImplementedError

    def _read(self, position: Position, replay: int) -> Iterator[AssignedBatch]:
        raise NotImplementedError


class ShardStream(_Feed):
    """Reads an iterable that every rank reads. `start`: the position of its first element in the epoch."""

    kind = "stream"
    start = 0

    def _source(self, position: Position) -> _Source:
        return _Source(_Blocks, self._dataset, self._deal, position, self.start, self._seed)

    def _read(self, position: Position, replay: int) -> Iterator[AssignedBatch]:
        del replay  # the workers skip what was consumed
        for batch, count, size, total in self._loader:
            position = Position(position.epoch, position.consumed + total)
            yield AssignedBatch(batch, count, size, total, position)
        self._exhausted = True


class Shards(_Feed):
    """Reads a shard per rank. `total` sums a number over all ranks."""

    kind = "shards"

    def __init__(
        self, dataset: Any, deal: BatchAssignment, options: dict[str, Any], seed: int, total: Callable[[int], int]
    ) -> None:
        super().__init__(dataset, deal, options, seed)
        self._total = total

    def rest(self, parted: Parted) -> ShardStream:
        """Return a stream of what other ranks have left of the epoch."""
        stream = ShardStream(_Rest(self._dataset, parted, self._seed), self._deal, self._options, self._seed)
        stream.start = parted.consumed
        return stream

    def _source(self, position: Position) -> _Source:
        return _Source(_Shard, self._dataset, self._deal, position, 0, self._seed)

    def _read(self, position: Position, replay: int) -> Iterator[AssignedBatch]:
        batches = self._batches()
        with rng.untouched() if replay else contextlib.nullcontext():
            for _ in range(replay):
                next(batches)
        spare: tuple[Any, int] | None = None
        while True:
            batch, count, size = next(batches)
            total = self._total(count)
            if not total or (self._deal.last == "drop" and total < sum(self._deal.batches)):
                return
            if not count:
                # Other ranks still have samples: take part in their steps with padding.
                batch, size = spare = spare or self._padding(position.epoch)
            position = Position(position.epoch, position.consumed + total)
            yield AssignedBatch(batch, count, size, total, position)

    def _batches(self) -> Iterator[tuple[Any, int, int]]:
        """Yield the batches of this rank's shard, and then empty ones forever."""
        for batch, count, size, _ in self._loader:
            yield batch, count, size
        self._exhausted = True
        while True:
            yield None, 0, 0

    def _padding(self, epoch: int) -> tuple[Any, int]:
        """Return the first sample of the whole data set. A resumed run may not have this rank's last batch."""
        size = self._deal.batch if self._deal.last == "pad" else 1
        collate = self._options.get("collate_fn") or default_collate
        first = _Elements(self._dataset.shard(index=0, count=1), rng.number(self._seed, epoch)).take(1)
        with rng.untouched():
            return collate(first * size), size


class _Elements:
    """A data set that is being read."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._numbers = rng.RngState(seed)
        self.ended = False
        with self._reading():
            self._iterator: Any = iter(dataset)

    def take(self, number: int) -> list[Any]:
        """Return this many elements, or what is left."""
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
        teller = self._iterator if is_stateful(self._iterator) else self._dataset
        return {"ended": self.ended, "numbers": self._numbers.state_dict(), "data": teller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # At its end a data set may be at its start again, so the end is saved separately.
        self.ended = state["ended"]
        self._numbers.load_state_dict(state["numbers"])
        if is_stateful(self._iterator):
            self._iterator.load_state_dict(state["data"])
        else:
            self._dataset.load_state_dict(state["data"])
            with self._reading():
                self._iterator = iter(self._dataset)


class _Rest:
    """The rest of an epoch that was divided into shards: all shards, without what was read of each."""

    def __init__(self, dataset: Any, parted: Parted, seed: int) -> None:
        self.dataset = dataset
        self.parted = parted
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
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
            # As a DataLoader does: one batch per worker in turn, without those that have ended.
            done = 0
            while parts and done < self.parted.steps:
                taken = len(parts[0].take(batch))
                if taken < (batch if self.parted.last == "drop" else 1):
                    parts.popleft()
                else:
                    parts.rotate(-1)
                    done += 1
            for part in parts:
                while samples := part.take(batch):
                    yield from samples


def _part(dataset: Any, index: int, count: int, seed: int, epoch: int) -> _Elements:
    return _Elements(dataset.shard(index=index, count=count), rng.number(seed, epoch, index))


@dataclass(eq=False)
class _Source(IterableDataset):  # type: ignore[misc]
    """The data set of the DataLoader: whole batches with their counts."""

    reader: type[_Reader]
    dataset: Any
    deal: BatchAssignment
    position: Position
    start: int
    seed: int

    def __iter__(self) -> _Reader:
        return self.reader(self, get_worker_info())


class _Reader:
    """Reads the data set in one worker."""

    def __init__(self, source: _Source, worker: Any) -> None:
        self.deal = source.deal
        self.position = source.position
        self.seed = source.seed
        self.apart = worker is not None  # in a process of its own
        self.worker: int = worker.id if worker else 0
        self.workers: int = worker.num_workers if worker else 1
        self.elements = self.open(source.dataset)
        self.read = source.start
        self.place = source.position.consumed + self.worker * sum(self.deal.batches)

    def open(self, dataset: Any) -> _Elements:
        raise NotImplementedError

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> tuple[list[Any], int, int, int]:
        raise NotImplementedError

    def take(self, number: int) -> list[Any]:
        taken = self.elements.take(number)
        self.read += len(taken)
        return taken

    def seed_batch(self, reader: int) -> None:
        """Seed for collating a batch. In the process of the training, its own generators are used."""
        if self.apart:
            rng.seed(rng.number(self.seed, self.position.epoch, reader, self.read))

    # torchdata's StatefulDataLoader calls these, in the worker.
    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "place": self.place, **self.elements.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read, self.place = state["read"], state["place"]
        self.elements.load_state_dict(state)


class _Blocks(_Reader):
    """Takes the batches of all ranks for a step from the stream; the workers of a rank take the steps in turn."""

    def open(self, dataset: Any) -> _Elements:
        return _Elements(dataset, rng.number(self.seed, self.position.epoch))

    def __next__(self) -> tuple[list[Any], int, int, int]:
        whole = sum(self.deal.batches)
        while self.read < self.place:
            if not self.take(min(whole, self.place - self.read)):
                raise StopIteration
        block = self.take(whole)
        here = Position(self.position.epoch, self.place)
        step = share(here, self.place + len(block), self.deal.batches, self.deal.last)
        if step is None:
            raise StopIteration
        self.seed_batch(self.deal.rank)
        self.place += whole * self.workers
        start = sum(step.counts[: self.deal.rank])
        count, size = step.counts[self.deal.rank], step.sizes[self.deal.rank]
        return block[start : start + count] + block[:1] * (size - count), count, size, step.total


class _Shard(_Reader):
    """Reads a shard, one batch after the other."""

    def open(self, dataset: Any) -> _Elements:
        self.index = self.deal.rank * self.workers + self.worker
        return _part(dataset, self.index, len(self.deal.batches) * self.workers, self.seed, self.position.epoch)

    def __next__(self) -> tuple[list[Any], int, int, int]:
        batch = self.deal.batch
        samples = self.take(batch)
        count = len(samples)
        if not count or (self.deal.last == "drop" and count < batch):
            raise StopIteration
        self.seed_batch(self.index)
        if self.deal.last == "pad":
            samples += samples[:1] * (batch - count)
        return samples, count, len(samples), 0


class _Collate:
    """Collates the samples, and passes the counts through."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate or default_collate

    def __call__(self, divided: tuple[list[Any], int, int, int]) -> tuple[Any, int, int, int]:
        samples, *counts = divided
        return (self.collate(samples), *counts)


def _loader(source: _Source, options: dict[str, Any], state: dict[str, Any] | None) -> Any:
    options = {**options, "collate_fn": _Collate(options.get("collate_fn")), "batch_size": None}
    stateful = find_stateful_loader() if is_stateful(source.dataset) else None
    if stateful is None:
        return DataLoader(source, **options)
    loader = stateful(source, **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def find_stateful_loader() -> Any:
    """Return torchdata's StatefulDataLoader, if it is installed (`pip install phalanx[data]`)."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    return StatefulDataLoader
