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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from phalanx.train.data import rng
from phalanx.train.data.assignment import AssignedBatch, BatchAssignment, Parted
from phalanx.train.data.order import Position
from phalanx.train.data.shard_reader import (
    BatchSource,
    CollateSamples,
    Elements,
    RestOfEpoch,
    ShardReader,
    StreamReader,
    is_stateful,
)


def can_shard(dataset: Any) -> bool:
    """Return whether it has `shard(index, count)`. Other libraries have `shard(num_shards, index)`."""
    method = getattr(dataset, "shard", None)
    return callable(method) and {"index", "count"} <= set(inspect.signature(method).parameters)


class _Feed:
    """The common part of both ways: a DataLoader for each time the data set is read."""

    kind = ""

    def __init__(self, dataset: Any, assignment: BatchAssignment, options: dict[str, Any], seed: int) -> None:
        self._dataset = dataset
        self._assignment = assignment
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
                self._loader = None  # torchdata's loader keeps its workers when a loop is left

    def _rewind(self, epoch: int) -> None:
        """Reset a stateful data set to its start: otherwise it would continue where it was read last."""
        if self._start is not None and not self._exhausted:
            self._dataset.load_state_dict(self._start)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if is_stateful(self._dataset):
            self._start = copy.deepcopy(self._dataset.state_dict())

    def snapshot(self) -> dict[str, Any] | None:
        """Return the state of the workers, if the data set has one and torchdata is installed."""
        reads_ahead = self._assignment.tail == "every"  # the state does not include elements that were read ahead
        known = is_stateful(self._loader) and not self._exhausted and not reads_ahead
        return self._loader.state_dict() if known else None

    def _source(self, position: Position) -> BatchSource:
        raise NotImplementedError

    def _read(self, position: Position, replay: int) -> Iterator[AssignedBatch]:
        raise NotImplementedError


class ShardStream(_Feed):
    """Reads an iterable that every rank reads. `start`: the position of its first element in the epoch."""

    kind = "stream"
    start = 0

    def _source(self, position: Position) -> BatchSource:
        return BatchSource(StreamReader, self._dataset, self._assignment, position, self.start, self._seed)

    def _read(self, position: Position, replay: int) -> Iterator[AssignedBatch]:
        del replay  # the workers skip consumed elements
        for batch, count, size, total in self._loader:
            position = Position(position.epoch, position.consumed + total)
            yield AssignedBatch(batch, count, size, total, position)
        self._exhausted = True


class Shards(_Feed):
    """Reads a shard per rank. `total` sums a number over all ranks."""

    kind = "shards"

    def __init__(
        self, dataset: Any, assignment: BatchAssignment, options: dict[str, Any], seed: int, total: Callable[[int], int]
    ) -> None:
        super().__init__(dataset, assignment, options, seed)
        self._total = total

    def rest(self, parted: Parted) -> ShardStream:
        """Return a stream of the elements of the epoch that other ranks have not read."""
        stream = ShardStream(
            RestOfEpoch(self._dataset, parted, self._seed), self._assignment, self._options, self._seed
        )
        stream.start = parted.consumed
        return stream

    def _source(self, position: Position) -> BatchSource:
        return BatchSource(ShardReader, self._dataset, self._assignment, position, 0, self._seed)

    def _read(self, position: Position, replay: int) -> Iterator[AssignedBatch]:
        batches = self._batches()
        with rng.untouched() if replay else contextlib.nullcontext():
            for _ in range(replay):
                next(batches)
        spare: tuple[Any, int] | None = None
        while True:
            batch, count, size = next(batches)
            # An evaluation does not communicate: each rank reads its shard to the end.
            total = count if self._assignment.tail == "every" else self._total(count)
            if not total or (self._assignment.tail == "drop" and total < sum(self._assignment.batches)):
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
        size = self._assignment.batch if self._assignment.tail == "pad" else 1
        collate = self._options.get("collate_fn") or default_collate
        first = Elements(self._dataset.shard(index=0, count=1), rng.number(self._seed, epoch)).take(1)
        with rng.untouched():
            return collate(first * size), size


def _loader(source: BatchSource, options: dict[str, Any], state: dict[str, Any] | None) -> Any:
    options = {**options, "collate_fn": CollateSamples(options.get("collate_fn")), "batch_size": None}
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


class RankTotal:
    """Sums a number over all ranks, on the CPU, in a separate group, so that it never waits for a device."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._group: Any = None

    def __call__(self, number: int) -> int:
        """Return the sum; all ranks call it together."""
        if self._world_size == 1:
            return number
        import torch.distributed as dist

        if self._group is None:
            self._group = dist.new_group(backend="shm" if "shm" in dist.get_backend() else "gloo")
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, group=self._group)
        return int(tensor.item())
