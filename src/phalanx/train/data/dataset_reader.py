"""Reads a data set: by index, as one stream from which ranks take their samples, or in shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import UsageError
from phalanx.train.data import rng
from phalanx.train.data.assignment import BatchAssignment
from phalanx.train.data.indexed import BatchIndices, IndexedData, SeededData, TensorBatches, as_it_is
from phalanx.train.data.loader_options import is_iterable, name_of
from phalanx.train.data.order import Position, count_steps
from phalanx.train.data.shard_reader import is_stateful
from phalanx.train.data.shards import Shards, ShardStream, can_shard, find_stateful_loader


@dataclass(frozen=True, kw_only=True)
class DatasetReader:
    """A data set, the order of its samples, and the options of the DataLoader that reads it."""

    dataset: Any
    seed: int
    shuffle: bool
    options: Mapping[str, Any]  # of torch's DataLoader
    own_generator: torch.Generator | None  # that of `options`, seeded for every epoch; None: the script's own
    total: Callable[[int], int]  # sums an int over all ranks

    def assigned(self, part: BatchAssignment) -> IndexedData | ShardStream | Shards:
        """Return the samples of one rank. Raises UsageError if they cannot be read as requested."""
        return self._in_order(part) if is_iterable(self.dataset) else self._by_index(part)

    def _by_index(self, part: BatchAssignment) -> IndexedData:
        dataset, options = self.dataset, dict(self.options)
        _refuse_nothing(len(dataset), part)
        if options["collate_fn"] is None and TensorBatches.can_read(dataset):
            dataset, options = TensorBatches(dataset), {**options, "collate_fn": as_it_is}
        # Do not interfere with a script that seeds its workers itself.
        seeded = options["num_workers"] > 0 and self.own_generator is not None and options.get("worker_init_fn") is None
        here = options["num_workers"] == 0 and isinstance(dataset, TensorBatches)
        indices = BatchIndices(len(self.dataset), self.seed, self.shuffle, part, seeded=seeded, as_tensors=here)
        return IndexedData(SeededData(dataset) if seeded else dataset, indices, options)

    def _in_order(self, part: BatchAssignment) -> ShardStream | Shards:
        options = dict(self.options)
        if self.shuffle:
            raise UsageError(
                f"{name_of(self.dataset)} is iterable, and cannot be shuffled: it has no index",
                fix="leave out shuffle=True, and let the data set shuffle in its __iter__, the same way on every rank",
            )
        if options["persistent_workers"]:
            raise UsageError(
                f"persistent_workers=True with {name_of(self.dataset)}, which is iterable",
                details=["workers learn where to continue when they start, so each epoch needs new ones"],
                fix="leave out persistent_workers",
            )
        if is_stateful(self.dataset) and find_stateful_loader() is None:
            warnings.warn(
                f"{name_of(self.dataset)} has state_dict(), but torchdata is not installed: "
                "in a resumed run what was consumed is read again and skipped (pip install phalanx[data])",
                stacklevel=6,  # the line of the script that calls `run.loader`
            )
        if can_shard(self.dataset):
            return Shards(self.dataset, part, options, self.seed, self.total)
        return ShardStream(self.dataset, part, options, self.seed)

    def seed_workers(self, position: Position, rank: int) -> None:
        """Seed the DataLoader for the samples from here on. Does nothing if the script has passed a generator."""
        if self.own_generator is not None:
            # Not torch's global generator: a DataLoader draws from it at every start, and a resumed run starts again.
            self.own_generator.manual_seed(rng.number(self.seed, position.epoch, position.consumed, rank))


def _refuse_nothing(length: int, part: BatchAssignment) -> None:
    if not count_steps(length, part.batches, part.tail):
        dropped = ", and the last ones are dropped" if part.tail == "drop" else ""
        raise UsageError(
            f"an epoch has no step: {length} samples, {sum(part.batches)} per step{dropped}",
            fix=f"global_batch={length} or less, or drop_last=False" if length else "give a data set that has samples",
        )
