"""Data sets that can only be read from front to back: who takes which part of them, in which worker of which rank.

Two ways, and the data set says which:

- `Stream`: any iterable. Every DataLoader worker of every rank reads all of it and keeps its own part, exactly as with
  a data set that has an index. It costs reading, not talking: nothing is exchanged between ranks, and it goes on at any
  number of ranks. Every rank has to be given the same elements in the same order.
- `Shards`: a data set with a method `shard(index, count)`. Every worker of every rank reads a part of its own. How long
  the parts are nobody knows, so all ranks agree on every step: one all_reduce of one number on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from phalanx.train.order import Last, Position, share


@dataclass(frozen=True)
class Dealt:
    """One rank's batch: `size` samples, of which the first `count` count; `total` count on all ranks together."""

    batch: Any
    count: int
    size: int
    total: int
    next: Position


@dataclass(frozen=True)
class Deal:
    """How a step is dealt: the batch size of every rank, which of them is ours, and what becomes of the rest."""

    batches: tuple[int, ...]
    rank: int
    last: Last

    @property
    def batch(self) -> int:
        return self.batches[self.rank]


def is_stateful(dataset: Any) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def can_shard(dataset: Any) -> bool:
    """By the names of its parameters, for there are other methods of this name: `shard(num_shards, index)`."""
    method = getattr(dataset, "shard", None)
    return callable(method) and {"index", "count"} <= set(inspect.signature(method).parameters)


class _Feed:
    """What is common to both ways: a DataLoader for each time the data set is read."""

    kind = ""

    def __init__(self, dataset: Any, deal: Deal, options: dict[str, Any]) -> None:
        self._dataset = dataset
        self._deal = deal
        self._options = options
        self._loader: Any = None
        self._exhausted = False
        self._start: Any = None

    def open(self, position: Position, steps: int, state: dict[str, Any] | None) -> Iterator[Dealt]:
        """From `position` on, which is `steps` into the epoch; at once, if `state` is a snapshot of just there."""
        self._rewind()
        self._exhausted = False
        self._loader = _loader(_Source(self._reader(), self._dataset, self._deal, position), self._options, state)
        return self._read(position, 0 if state else steps)

    def _rewind(self) -> None:
        """A data set that can tell where it is goes on from there when it is read again: here that is too far."""
        if is_stateful(self._dataset):
            if self._start is not None and not self._exhausted:
                self._dataset.load_state_dict(self._start)
            self._start = copy.deepcopy(self._dataset.state_dict())

    def snapshot(self) -> dict[str, Any] | None:
        """Where the workers are in the data set, if it can tell and torchdata is there to ask it."""
        return self._loader.state_dict() if is_stateful(self._loader) and not self._exhausted else None

    def _reader(self) -> type[_Reader]:
        raise NotImplementedError

    def _read(self, position: Position, replay: int) -> Iterator[Dealt]:
        raise NotImplementedError


class Stream(_Feed):
    """Feeds a rank from an iterable that every rank reads."""

    kind = "stream"

    def _reader(self) -> type[_Reader]:
        return _Blocks

    def _read(self, position: Position, replay: int) -> Iterator[Dealt]:
        del replay  # the workers pass over what was consumed
        for batch, count, size, total in self._loader:
            position = Position(position.epoch, position.consumed + total)
            yield Dealt(batch, count, size, total, position)
        self._exhausted = True


class Shards(_Feed):
    """Feeds a rank from a part of the data set that is its own. `total` adds up a number over all ranks."""

    kind = "shards"

    def __init__(self, dataset: Any, deal: Deal, options: dict[str, Any], total: Callable[[int], int]) -> None:
        super().__init__(dataset, deal, options)
        self._total = total

    def _reader(self) -> type[_Reader]:
        return _Shard

    def _read(self, position: Position, replay: int) -> Iterator[Dealt]:
        batches = self._batches()
        for _ in range(replay):
            next(batches)
        spare: tuple[Any, int] | None = None
        while True:
            batch, count, size = next(batches)
            total = self._total(count)
            if not total or (self._deal.last == "drop" and total < sum(self._deal.batches)):
                return
            if not count:
                # Others still have samples. This rank steps along with what does not count: nobody waits for it.
                batch, size = spare or self._padding()
            spare = batch, size
            position = Position(position.epoch, position.consumed + total)
            yield Dealt(batch, count, size, total, position)

    def _batches(self) -> Iterator[tuple[Any, int, int]]:
        """Those of this rank's part, and then nothing, for ever."""
        for batch, count, size, _ in self._loader:
            yield batch, count, size
        self._exhausted = True
        while True:
            yield None, 0, 0

    def _padding(self) -> tuple[Any, int]:
        """For a rank that never had a sample: the first of the whole data set."""
        size = self._deal.batch if self._deal.last == "pad" else 1
        collate = self._options.get("collate_fn") or default_collate
        return collate([next(iter(self._dataset.shard(index=0, count=1)))] * size), size


class _Source(IterableDataset):  # type: ignore[misc]
    """What a DataLoader reads: whole batches, each with its counts."""

    def __init__(self, reader: type[_Reader], dataset: Any, deal: Deal, position: Position) -> None:
        self.reader = reader
        self.dataset = dataset
        self.deal = deal
        self.position = position

    def __iter__(self) -> _Reader:
        worker = get_worker_info()
        place = (worker.id, worker.num_workers) if worker else (0, 1)
        return self.reader(self.dataset, self.deal, self.position, *place)


class _Reader:
    """Reads the data set in one worker; knows where it is."""

    def __init__(self, dataset: Any, deal: Deal, position: Position, worker: int, workers: int) -> None:
        self.deal = deal
        self.position = position
        self.worker, self.workers = worker, workers
        with _unnumbered():
            self.source = self.part(dataset)
            self.elements: Any = iter(self.source)
        self.read = 0
        self.place = position.consumed + worker * sum(deal.batches)

    def part(self, dataset: Any) -> Any:
        return dataset

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> tuple[list[Any], int, int, int]:
        raise NotImplementedError

    def take(self, number: int) -> list[Any]:
        with _unnumbered():
            taken = list(islice(self.elements, number))
        self.read += len(taken)
        return taken

    # torchdata's StatefulDataLoader asks for these, in the worker.
    def state_dict(self) -> dict[str, Any]:
        teller = self.elements if is_stateful(self.elements) else self.source
        return {"read": self.read, "place": self.place, "data": teller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read, self.place = state["read"], state["place"]
        if is_stateful(self.elements):
            self.elements.load_state_dict(state["data"])
        else:
            self.source.load_state_dict(state["data"])
            with _unnumbered():
                self.elements = iter(self.source)


@contextlib.contextmanager
def _unnumbered() -> Iterator[None]:
    """The data set does not see which worker it is in: one that deals by it, as in torch's manual, would deal again."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


class _Blocks(_Reader):
    """All ranks' batches of a step are one run of the stream; the workers of a rank take the steps in turn."""

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
        self.place += whole * self.workers
        start = sum(step.counts[: self.deal.rank])
        count, size = step.counts[self.deal.rank], step.sizes[self.deal.rank]
        return block[start : start + count] + block[:1] * (size - count), count, size, step.total


class _Shard(_Reader):
    """A part that nobody else reads, one batch after the other."""

    def part(self, dataset: Any) -> Any:
        ranks = len(self.deal.batches)
        return dataset.shard(index=self.deal.rank * self.workers + self.worker, count=ranks * self.workers)

    def __next__(self) -> tuple[list[Any], int, int, int]:
        batch = self.deal.batch
        samples = self.take(batch)
        count = len(samples)
        if not count or (self.deal.last == "drop" and count < batch):
            raise StopIteration
        if self.deal.last == "pad":
            samples += samples[:1] * (batch - count)
        return samples, count, len(samples), 0


class _Collate:
    """Collates the samples, and lets the counts pass."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate or default_collate

    def __call__(self, dealt: tuple[list[Any], int, int, int]) -> tuple[Any, int, int, int]:
        samples, *counts = dealt
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
    """torchdata's, if it is installed (`pip install phalanx[data]`)."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return StatefulDataLoader
