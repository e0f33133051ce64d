"""Batches for this rank: every sample once per epoch, resumed after the last committed step with any number of ranks.

loader = Loader(dataset, group, batch_size=64, shuffle=True)
for batch in loader:                       # the rest of the epoch; the next loop reads the next epoch
    loss = loss_fn(model(batch)) * loader.scale
    ...
    loader.commit()                        # these samples are done: only they are in state_dict()

A loader of `run.loader` is read through its run, where `run.step` commits and `run.backward` applies the scale; without
a run, do both yourself. Batches that were read but not committed are read again, also those that a DataLoader has
prefetched.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from phalanx.errors import UsageError
from phalanx.train.data.assignment import AssignedBatch, BatchAssignment, Parted
from phalanx.train.data.cursor import LoaderCursor
from phalanx.train.data.dataset_reader import DatasetReader
from phalanx.train.data.indexed import IndexedData
from phalanx.train.data.loader_options import (
    check_number,
    choose_tail,
    global_batch_of,
    name_of,
    pins,
    refuse_samplers,
)
from phalanx.train.data.order import Position, count_steps, deal
from phalanx.train.data.shards import RankTotal, Shards, ShardStream, find_stateful_loader
from phalanx.worker.process_group import seeds

VERSION = 1


class Ranks(Protocol):
    """A process group, as far as a loader needs it. `seed` and `device` are used if present."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...


@dataclass
class _Loop:
    """One loop over a loader."""

    source: IndexedData | ShardStream | Shards
    batch: AssignedBatch | None = None  # the current one


class Loader:
    """`run.loader(dataset, batch_size=64, shuffle=True)`: this rank's part of every batch.

    - `batch_size`: samples per rank
    - `global_batch`: samples of all ranks together, which stays the same when their number changes; give one of the two
    - `train`: False for evaluation: every sample exactly once, in order, nothing dropped and no padding. Default: True
      with shuffle, drop_last or pad_last; without them, False when read under `torch.no_grad()`
    - `shuffle`: shuffle every epoch. Default: False
    - `drop_last`: drop the last samples, which do not fill a global batch. Default: True with shuffle=True or
      train=True, else False: the last batches are smaller, and a rank without samples gets one with a scale of 0
    - `pad_last`: keep the size of the last batches, padded with samples that must not count: the mean loss is
      `(losses * loader.sample_weights).sum()`. Default: False
    - `weights`: one number per rank: a rank with 0.5 takes half as many samples as one with 1. The global batch stays
    - `seed`: Default: that of the run
    - `total`: a function that sums an int over all ranks, for a data set with `shard(index, count)`. Default: a process
      group is made for it at the first batch

    num_workers, collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor
    and persistent_workers are those of torch's DataLoader. sampler and batch_sampler are refused: the loader divides
    the samples among the ranks itself. All ranks take the same number of steps.

    In an evaluation, a remainder of fewer samples than ranks goes to the last full step, whose batches get one sample
    more. Ranks have different numbers of batches only if there are fewer samples than ranks, or if the data set is read
    in shards; then a sharded model cannot be evaluated.

    The mean of all ranks' gradients is the mean over samples if the mean loss of each batch is multiplied by `scale`,
    which is 1 if all ranks have equally many; `run.backward` does that.

    An iterable data set is read as `train/data/shards.py` describes. One with `state_dict` and `load_state_dict` is
    resumed with them if torchdata is installed (`pip install phalanx[data]`). Otherwise, and with another number of
    ranks or workers than before, what was consumed is read again and skipped.

    Random numbers (Python's, NumPy's, torch's) that a data set draws depend on seed, epoch and position, not on how
    often the run was resumed. A data set with an index and num_workers=0 draws from the generators of the training,
    which checkpoints contain.
    """

    def __init__(
        self,
        dataset: Any,
        group: Ranks,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        train: bool | None = None,
        shuffle: bool = False,
        drop_last: bool | None = None,
        pad_last: bool = False,
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        total: Callable[[int], int] | None = None,
    ) -> None:
        refuse_samplers(sampler=sampler, batch_sampler=batch_sampler)
        self.dataset = dataset
        self.train = train
        self.rank, self.world_size = group.rank, group.world_size
        self.seed = int(getattr(group, "seed", 0)) if seed is None else seed
        self.shuffle = shuffle
        self.tail = choose_tail(train, shuffle, drop_last, pad_last)
        self.batches = deal(global_batch_of(batch_size, global_batch, group.world_size), group.world_size, weights)
        self._device = getattr(group, "device", None)
        check_number("num_workers", num_workers)
        if seed is not None:
            seeds.check(seed)
        if collate_fn is not None and not callable(collate_fn):
            raise UsageError(f"collate_fn={collate_fn!r}: expected a function of a list of samples")
        seeded = torch.Generator() if generator is None else None
        options = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pins(self._device) if pin_memory is None else pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
            "generator": generator if seeded is None else seeded,
        }
        self._data = DatasetReader(
            dataset=dataset,
            seed=self.seed,
            shuffle=shuffle,
            options=options,
            own_generator=seeded,
            total=total or RankTotal(group.world_size),
        )
        self._feed = self._assigned()
        self._cursor = LoaderCursor()
        self._loop = _Loop(self._feed)
        self._batches: weakref.WeakMethod[Callable[[Loader], Iterator[Any]]] | None = None

    def read_through(self, batches: Callable[[Loader], Iterator[Any]]) -> None:
        """Make a loop over this loader call `batches(self)`, a method that reads it with `rest`."""
        # a run holds its loaders; a strong reference would need the garbage collector
        self._batches = weakref.WeakMethod(batches)

    def _assigned(self) -> IndexedData | ShardStream | Shards:
        return self._data.assigned(BatchAssignment(self.batches, self.rank, self.tail))

    # The loop

    @property
    def position(self) -> Position:
        """The position after the last committed step."""
        return self._cursor.committed[0]

    @property
    def taken(self) -> Position:
        """The position after the current batch, committed or not."""
        return self._cursor.taken[0]

    @property
    def epoch(self) -> int:
        """The epoch of the last committed step."""
        return self.position.epoch

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a full step."""
        return self.batches[self.rank]

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a full step."""
        return sum(self.batches)

    def __len__(self) -> int:
        """Return the steps of a whole epoch. Raises TypeError for a data set without a length."""
        if isinstance(self._feed, Shards):
            raise TypeError(f"{name_of(self.dataset)} is read in shards, whose length is not known in advance")
        return count_steps(len(self.dataset), self.batches, self.tail)

    def begin_evaluation(self) -> None:
        """Read every sample exactly once from now on, as with train=False, unless another mode was requested."""
        if self.train is None and self.tail == "uneven":
            self.tail = "every"
            self._feed = self._assigned()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, like `run.batches(loader)` if the loader belongs to a run."""
        batches = self._batches() if self._batches is not None else None
        return self.rest() if batches is None else batches(self)

    def rest(self) -> Iterator[Any]:
        """Return the batches after the last committed step, to the end of the epoch."""
        position, done, resume = self._cursor.start()
        if not torch.is_grad_enabled() and position.consumed == 0 and resume is None:
            self.begin_evaluation()
        elif self.train is None and self.tail == "every":
            self.tail = "uneven"
            self._feed = self._assigned()
        self._data.seed_workers(position, self.rank)
        source = self._feed
        if self._cursor.parted is not None and isinstance(source, Shards):
            source = source.rest(self._cursor.parted)
        self._loop = _Loop(source, self._loop.batch)
        return self._hand_out(source.open(position, done, resume), self._loop)

    def _hand_out(self, batches: Iterator[AssignedBatch], loop: _Loop) -> Iterator[Any]:
        for dealt in batches:
            if loop is not self._loop:
                raise UsageError(
                    "two loops read this loader at the same time: samples would be mixed up",
                    fix="end one loop over it before the next begins, or make a second loader",
                )
            loop.batch = dealt
            self._cursor.advance(dealt.next)
            yield dealt.batch
        self._cursor.finished = True

    def commit(self) -> None:
        """Commit all batches that were read so far: they are not read again."""
        self._cursor.commit()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; in the middle of that epoch, stay. A finished epoch starts again."""
        if epoch != self.epoch or self._cursor.finished:
            self._cursor.go_to(Position(epoch))

    # The current batch

    @property
    def last_count(self) -> int:
        """Samples of this rank's current batch, without padding."""
        return self._loop.batch.count if self._loop.batch else 0

    @property
    def last_size(self) -> int:
        """Samples of this rank's current batch, with padding."""
        return self._loop.batch.size if self._loop.batch else 0

    @property
    def last_total(self) -> int:
        """Samples of all ranks in the current step, without padding."""
        return self._loop.batch.total if self._loop.batch else 0

    @property
    def scale(self) -> float:
        """The weight of this rank's mean loss, with which the mean over ranks is the mean over samples."""
        return self.world_size * self._loop.batch.count / self._loop.batch.total if self._loop.batch else 1.0

    @property
    def sample_weights(self) -> Any:
        """A weight per sample of the current batch: `(losses * sample_weights).sum()` is the mean without padding."""
        if self._loop.batch is None:
            return torch.zeros(0, device=self._device)
        weights = torch.zeros(self._loop.batch.size, device=self._device)
        if self._loop.batch.count:
            weights[: self._loop.batch.count] = 1 / self._loop.batch.count
        return weights

    # State: plain values

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last committed step. It is the same on every rank, except for `workers`."""
        position, done = self._cursor.committed
        parted = self._cursor.parted
        return {
            "version": VERSION,
            "kind": self._feed.kind,
            "epoch": position.epoch,
            "consumed": position.consumed,
            "steps": done,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.length,
            "batches": list(self.batches),
            "num_workers": self._data.options["num_workers"],
            "tail": self.tail,
            "parted": parted and {**vars(parted), "batches": list(parted.batches)},
            "workers": self._workers_state(),
        }

    @property
    def length(self) -> int | None:
        """Samples of the whole data set. None: it is iterable, and the number is unknown."""
        return len(self.dataset) if self._feed.kind == "indexed" else None

    def _workers_state(self) -> dict[str, Any] | None:
        if self._cursor.resume is not None:
            return {"rank": self.rank, "state": self._cursor.resume}
        if not self._cursor.workers_at_commit:
            return None
        state = self._loop.source.snapshot()
        return state and {"rank": self.rank, "state": copy.deepcopy(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last committed step of `state`, with this loader's number of ranks and batch sizes."""
        if state.get("version") != VERSION:
            raise UsageError(
                f"this is not the state of a loader, or it is from another version of phalanx: {sorted(state)}",
                fix="pass what state_dict() of a loader returned, or do not resume the loader",
            )
        now = {"kind": self._feed.kind, "length": self.length, "shuffle": self.shuffle, "seed": self.seed}
        wrong = [f"{name}: {state[name]} then, {now[name]} now" for name in now if state[name] != now[name]]
        if wrong:
            raise UsageError(
                "the data has changed since this state was saved, so it is not known what was consumed",
                details=wrong,
                fix="use the same data set, seed and shuffle, or do not resume the loader",
            )
        mine = {"batches": list(self.batches), "num_workers": self._data.options["num_workers"], "tail": self.tail}
        same = all(state[name] == mine[name] for name in mine)
        self._cursor.go_to(Position(state["epoch"], state["consumed"]), state["steps"])
        parted = state["parted"]
        if parted is None and self._feed.kind == "shards" and state["steps"] and not same:
            parted = {"workers": max(1, state["num_workers"])}
            parted |= {name: state[name] for name in ("batches", "tail", "steps", "consumed")}
        if parted is not None:
            self._cursor.parted = Parted(**{**parted, "batches": tuple(parted["batches"])})
        workers = state["workers"]
        # All ranks read the same stream, and a checkpoint has the state of rank 0.
        fits = same and workers is not None and (self._feed.kind == "stream" or workers["rank"] == self.rank)
        if fits and find_stateful_loader() is not None:
            self._cursor.resume = workers["state"]
