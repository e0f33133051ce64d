"""Batches for this rank: every sample once per epoch, resumed after the last committed step with any number of ranks.

loader = Loader(dataset, group, batch_size=64, shuffle=True)
for batch in loader:                       # the rest of the epoch; the next loop reads the next epoch
    loss = loss_fn(model(batch)) * loader.scale
    ...
    loader.commit()                        # these samples are done: only they are in state_dict()

`run.step` commits and `run.backward` applies the scale; without them, do both yourself. Batches that were read but not
committed are read again, also those that a DataLoader has prefetched.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, TensorDataset

from phalanx.errors import UsageError
from phalanx.train.data import rng
from phalanx.train.data.assignment import AssignedBatch, BatchAssignment, Parted
from phalanx.train.data.cursor import LoaderCursor
from phalanx.train.data.indexed import BatchIndices, IndexedData, SeededData, TensorBatches, as_it_is
from phalanx.train.data.order import Last, Position, check_last, count_steps, deal
from phalanx.train.data.shard_reader import is_stateful
from phalanx.train.data.shards import RankTotal, Shards, ShardStream, can_shard, find_stateful_loader

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


class Loader:
    """`run.loader(dataset, batch_size=64, shuffle=True)`: this rank's part of every batch.

    batch_size    samples per rank
    global_batch  samples of all ranks together, which stays the same when their number changes; give one of the two
    shuffle       shuffle every epoch. Default: False
    weights       one number per rank: a rank with 0.5 takes half as many samples as one with 1. The global batch stays
    last          what happens to the last samples, which do not fill a global batch. Default: "drop"
                  "drop"    they are dropped
                  "pad"     batches keep their size, padded with samples that must not count: the mean loss is
                            `(losses * loader.sample_weights).sum()`
                  "uneven"  smaller batches; a rank without samples gets one with a scale of 0
    seed          Default: that of the run
    total         a function that sums an int over all ranks, for a data set with `shard(index, count)`. Default: a
                  process group is made for it at the first batch

    All other options are those of torch's DataLoader. All ranks take the same number of steps.

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
        shuffle: bool = False,
        last: str = "drop",
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        generator: Any = None,
        total: Callable[[int], int] | None = None,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.rank, self.world_size = group.rank, group.world_size
        self.seed = int(getattr(group, "seed", 0)) if seed is None else seed
        self.shuffle = shuffle
        self.last: Last = check_last(last)
        self.batches = deal(_global_batch(batch_size, global_batch, group.world_size), group.world_size, weights)
        self._seeded = torch.Generator() if generator is None else None  # for every epoch; else by the script
        self._device = getattr(group, "device", None)
        self._workers = num_workers
        _refuse_foreign(options)
        self._feed = self._choose(
            {
                **options,
                "num_workers": num_workers,
                "collate_fn": collate_fn,
                "pin_memory": _pins(group) if pin_memory is None else pin_memory,
                "persistent_workers": persistent_workers,
                "prefetch_factor": prefetch_factor,
                "generator": generator if self._seeded is None else self._seeded,
            },
            total or RankTotal(group.world_size),
        )
        self._cursor = LoaderCursor()
        self._reading: IndexedData | ShardStream | Shards = self._feed
        self._times = 0  # loops over this loader
        self._dealt: AssignedBatch | None = None  # the current batch

    def _choose(self, options: dict[str, Any], total: Callable[[int], int]) -> IndexedData | ShardStream | Shards:
        part = BatchAssignment(self.batches, self.rank, self.last)
        if not _is_iterable(self.dataset):
            self._refuse_nothing(len(self.dataset))
            dataset = self.dataset
            if type(dataset) is TensorDataset and options["collate_fn"] is None:
                dataset, options = TensorBatches(dataset), {**options, "collate_fn": as_it_is}
            # A script that seeds its workers itself is left alone.
            seeded = self._workers > 0 and self._seeded is not None and options.get("worker_init_fn") is None
            indices = BatchIndices(len(self.dataset), self.seed, self.shuffle, part, seeded)
            return IndexedData(SeededData(dataset) if seeded else dataset, indices, options)
        if self.shuffle:
            raise UsageError(
                f"{_name(self.dataset)} is iterable, and cannot be shuffled: it has no index",
                fix="leave out shuffle=True, and let the data set shuffle in its __iter__, the same way on every rank",
            )
        if options["persistent_workers"]:
            raise UsageError(
                f"persistent_workers=True with {_name(self.dataset)}, which is iterable",
                details=["workers learn where to continue when they start, so each epoch needs new ones"],
                fix="leave out persistent_workers",
            )
        if is_stateful(self.dataset) and find_stateful_loader() is None:
            warnings.warn(
                f"{_name(self.dataset)} has state_dict(), but torchdata is not installed: "
                "in a resumed run what was consumed is read again and skipped (pip install phalanx[data])",
                stacklevel=4,
            )
        return (
            Shards(self.dataset, part, options, self.seed, total)
            if can_shard(self.dataset)
            else ShardStream(self.dataset, part, options, self.seed)
        )

    def _refuse_nothing(self, length: int) -> None:
        if not count_steps(length, self.batches, self.last):
            raise UsageError(
                f"an epoch has no step: {length} samples, {self.global_batch} per step, and last={self.last!r}",
                fix=f"global_batch={length} or less, or last='uneven'"
                if length
                else "give a data set that has samples",
            )

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
            raise TypeError(f"{_name(self.dataset)} is read in shards, whose length is not known in advance")
        return count_steps(len(self.dataset), self.batches, self.last)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches after the last committed step, to the end of the epoch."""
        position, done, resume = self._cursor.start()
        if self._seeded is not None:
            # Not torch's global generator: a DataLoader draws from it at every start, and a resumed run starts again.
            self._seeded.manual_seed(rng.number(self.seed, position.epoch, position.consumed, self.rank))
        self._reading = self._feed
        if self._cursor.parted is not None and isinstance(self._feed, Shards):
            self._reading = self._feed.rest(self._cursor.parted)
        self._times += 1
        return self._hand_out(self._reading.open(position, done, resume), self._times)

    def _hand_out(self, batches: Iterator[AssignedBatch], time: int) -> Iterator[Any]:
        for dealt in batches:
            if time != self._times:
                raise UsageError(
                    "two loops read this loader at the same time: samples would be mixed up",
                    fix="end one loop over it before the next begins, or make a second loader",
                )
            self._dealt = dealt
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
        return self._dealt.count if self._dealt else 0

    @property
    def last_total(self) -> int:
        """Samples of all ranks in the current step, without padding."""
        return self._dealt.total if self._dealt else 0

    @property
    def scale(self) -> float:
        """The weight of this rank's mean loss, with which the mean over ranks is the mean over samples."""
        return self.world_size * self._dealt.count / self._dealt.total if self._dealt else 1.0

    @property
    def sample_weights(self) -> Any:
        """A weight per sample of the current batch: `(losses * sample_weights).sum()` is the mean without padding."""
        if self._dealt is None:
            return torch.zeros(0, device=self._device)
        weights = torch.zeros(self._dealt.size, device=self._device)
        if self._dealt.count:
            weights[: self._dealt.count] = 1 / self._dealt.count
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
            "length": self._length(),
            "batches": list(self.batches),
            "num_workers": self._workers,
            "last": self.last,
            "parted": parted and {**vars(parted), "batches": list(parted.batches)},
            "workers": self._workers_state(),
        }

    def _length(self) -> int | None:
        return len(self.dataset) if self._feed.kind == "indexed" else None

    def _workers_state(self) -> dict[str, Any] | None:
        if self._cursor.resume is not None:
            return {"rank": self.rank, "state": self._cursor.resume}
        if not self._cursor.workers_at_commit:
            return None
        state = self._reading.snapshot()
        return state and {"rank": self.rank, "state": copy.deepcopy(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last committed step of `state`, with this loader's number of ranks and batch sizes."""
        if state.get("version") != VERSION:
            raise UsageError(
                f"this is not the state of a loader, or it is from another version of phalanx: {sorted(state)}",
                fix="pass what state_dict() of a loader returned, or do not resume the loader",
            )
        now = {"kind": self._feed.kind, "length": self._length(), "shuffle": self.shuffle, "seed": self.seed}
        wrong = [f"{name}: {state[name]} then, {now[name]} now" for name in now if state[name] != now[name]]
        if wrong:
            raise UsageError(
                "the data has changed since this state was saved, so it is not known what was consumed",
                details=wrong,
                fix="use the same data set, seed and shuffle, or do not resume the loader",
            )
        mine = {"batches": list(self.batches), "num_workers": self._workers, "last": self.last}
        same = all(state[name] == mine[name] for name in mine)
        self._cursor.go_to(Position(state["epoch"], state["consumed"]), state["steps"])
        parted = state["parted"]
        if parted is None and self._feed.kind == "shards" and state["steps"] and not same:
            parted = {"workers": max(1, state["num_workers"])}
            parted |= {name: state[name] for name in ("batches", "last", "steps", "consumed")}
        if parted is not None:
            self._cursor.parted = Parted(**{**parted, "batches": tuple(parted["batches"])})
        workers = state["workers"]
        # All ranks read the same stream, and a checkpoint has the state of rank 0.
        fits = same and workers is not None and (self._feed.kind == "stream" or workers["rank"] == self.rank)
        if fits and find_stateful_loader() is not None:
            self._cursor.resume = workers["state"]


def _global_batch(batch_size: int | None, global_batch: int | None, world_size: int) -> int:
    given = {"batch_size": batch_size, "global_batch": global_batch}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1 or not all(isinstance(value, int) and value > 0 for value in given.values()):
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UsageError(
            f"the batch size is missing or wrong: {said or 'neither batch_size nor global_batch'} was given",
            fix="batch_size=… (samples of one rank) or global_batch=… (of all ranks together)",
        )
    return global_batch or (batch_size or 0) * world_size


def _refuse_foreign(options: dict[str, Any]) -> None:
    ours = {"sampler", "batch_sampler", "drop_last"} & set(options)
    if ours:
        raise UsageError(
            f"{', '.join(sorted(ours))}: this loader chooses the samples of each rank itself",
            fix='shuffle=…, weights=… and last="drop", "pad" or "uneven"',
        )
    if options.get("in_order") is False:
        raise UsageError(
            "in_order=False: without the order it is not known which samples are consumed",
            fix="leave in_order out",
        )


def _is_iterable(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__"):
            raise UsageError(
                f"{_name(dataset)} is not a data set", fix="pass one with __getitem__ and __len__, or with __iter__"
            )
        if hasattr(dataset, "__next__"):
            raise UsageError(
                f"{_name(dataset)} can be read only once, but every epoch reads it",
                fix="pass an object whose __iter__ starts again, such as a torch.utils.data.IterableDataset",
            )
        return True
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"{_name(dataset)} has an index but no length", fix="give it a __len__, or make it iterable")
    return False


def _name(dataset: Any) -> str:
    return type(dataset).__name__


def _pins(group: Ranks) -> bool:
    device = getattr(group, "device", None)
    return bool(torch.cuda.is_available()) if device is None else str(device).startswith("cuda")
