"""Reads a data set that has an index: the indices of this rank's batches, and torch's DataLoader for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from phalanx.train.data import rng
from phalanx.train.data.assignment import AssignedBatch, BatchAssignment
from phalanx.train.data.order import Order, Position, Step, steps

_AHEAD = 4096  # places that are looked up at once: single lookups would be too slow for small steps


class IndexedData:
    """Reads a data set with an index: torch's DataLoader in our order."""

    kind = "indexed"

    def __init__(self, dataset: Any, indices: BatchIndices, options: dict[str, Any]) -> None:
        self._indices = indices
        # One for all epochs, so that its workers can persist. It iterates over the indices again each time.
        self._loader = DataLoader(dataset, batch_sampler=indices, **options)

    def open(self, position: Position, steps: int, state: dict[str, Any] | None) -> Iterator[AssignedBatch]:
        """Read from `position` on."""
        del steps, state
        self._indices.position = position
        return self._read(self._indices.steps(), self._indices.part.rank)

    def _read(self, steps: Iterator[Step], rank: int) -> Iterator[AssignedBatch]:
        mine = (step for step in steps if step.sizes[rank])
        for step, batch in zip(mine, self._loader, strict=True):
            yield AssignedBatch(batch, step.counts[rank], step.sizes[rank], step.total, step.next)

    def snapshot(self) -> None:
        """Return None: the workers have no state beside the position."""


class BatchIndices:
    """A batch sampler: the indices of this rank's batches from `position` on."""

    def __init__(
        self, length: int, seed: int, shuffle: bool, part: BatchAssignment, *, seeded: bool, as_tensors: bool = False
    ) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.part = part
        self.seeded = seeded  # each batch begins with a seed, for `SeededData`
        self.as_tensors = as_tensors  # for `TensorBatches` in this process
        self.position = Position()

    def steps(self) -> Iterator[Step]:
        """Yield the steps to the end of the epoch."""
        return steps(self.position, self.length, self.part.batches, self.part.tail)

    def __iter__(self) -> Iterator[Any]:
        if self.as_tensors:
            return (batch for batches in self._batches() for batch in batches)
        lists = (batch for batches in self._batches() for batch in batches.tolist())
        if not self.seeded:
            return lists
        rank = self.part.rank
        numbers = (rng.number(self.seed, *step.position, rank) for step in self.steps() if step.sizes[rank])
        return ([number, *batch] for number, batch in zip(numbers, lists, strict=True))

    def _batches(self) -> Iterator[torch.Tensor]:
        """Yield the indices of several batches at a time, one batch per row."""
        order = Order(self.length, seed=self.seed, epoch=self.position.epoch, shuffle=self.shuffle)
        whole, batch, rank = sum(self.part.batches), self.part.batch, self.part.rank
        start = self.position.consumed + sum(self.part.batches[:rank])
        full, rest = divmod(self.length - self.position.consumed, whole)
        if full and self.part.tail == "every" and 0 < rest < len(self.part.batches):
            full -= 1  # the last full step includes the rest
        ahead = max(1, _AHEAD // batch)
        for first in range(0, full, ahead):
            numbers = torch.arange(first, min(first + ahead, full))
            yield look_up(order, start + whole * numbers[:, None] + torch.arange(batch))
        after = Position(self.position.epoch, self.position.consumed + full * whole)
        for step in steps(after, self.length, self.part.batches, self.part.tail):
            if step.sizes[rank]:
                yield look_up(order, torch.tensor(step.portion(rank).places))[None]


class TensorBatches:
    """A TensorDataset that is read batch by batch: reading by sample takes ten times as long."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    @staticmethod
    def can_read(dataset: Any) -> bool:
        """Return whether a data set can be read so: not subclasses, which may transform samples, nor tensors that
        cannot be indexed with a tensor.
        """
        return type(dataset) is TensorDataset and all(
            tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
            for tensor in dataset.tensors
        )

    def __getitems__(self, indices: list[int] | torch.Tensor) -> list[Any]:
        places = torch.as_tensor(indices)
        return [tensor[places] for tensor in self._tensors]


def as_it_is(batch: list[Any]) -> list[Any]:
    """Return the batch: a `collate_fn` for batches that are already tensors."""
    return batch


class SeededData:
    """The data set in a worker, seeded for every batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._many = getattr(dataset, "__getitems__", None)

    def __getitems__(self, batch: list[int]) -> list[Any]:
        seed, *indices = batch
        rng.seed(seed)
        if self._many is not None:
            return list(self._many(indices))
        return [self._dataset[index] for index in indices]


def look_up(order: Order, places: torch.Tensor) -> torch.Tensor:
    """Return `order[place]` for all places at once."""
    if not order.shuffle:
        return places
    found = order.permute(places)
    outside = found >= order.length  # few, if any
    if outside.any():
        found[outside] = torch.tensor([order.inside(place) for place in found[outside].tolist()])
    return found
