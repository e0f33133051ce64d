"""The batches that a training reads: on its device, with random numbers per batch, and counted until a step commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import UsageError
from phalanx.train.data import rng
from phalanx.train.data.loader import Loader
from phalanx.train.data.order import count_steps
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.script_warnings import ScriptWarnings
from phalanx.train.stepping.stepper import Stepper
from phalanx.worker.process_group.group import WorkerProcessGroup


@dataclass(slots=True, eq=False)
class BatchReading:
    """One loop over data."""

    data: Any
    left: int | None = None  # batches after the current one, to the end of the epoch
    samples: int = 0  # of all ranks, since the last commit
    own: int = 0  # of this rank, since the last commit
    stepped: Any = None  # the optimizer that has committed the current batch


class BatchReader:
    """Reads data for `run.batches`, and provides the current batch to `run.backward` and `run.step`."""

    def __init__(
        self,
        group: WorkerProcessGroup,
        *,
        kept: KeptObjects,
        counter: TrainingProgress,
        stepper: Stepper,
        warnings: ScriptWarnings,
    ) -> None:
        self._group = group
        self._placement = group.membership.placement
        self._device = group.device
        self._kept = kept
        self._counter = counter
        self._stepper = stepper
        self._warnings = warnings
        self._readings: list[BatchReading] = []
        self._current: BatchReading | None = None  # the reading whose batch was read last
        self._restored: dict[str, Any] | None = None  # random state of a checkpoint, until the first epoch
        self.found_nothing = False  # the latest loop over kept data had no batch left

    def epochs(self, count: int, *, begun: Callable[[], None]) -> Iterator[int]:
        """Yield the epochs from the current one to the last. `begun` is called at the beginning of each."""
        counter = self._counter
        counter.epochs = count
        loaders = self._kept.loaders
        if loaders:
            counter.epoch = max(counter.epoch, loaders[0].epoch)
        self.restore_rng()
        for epoch in range(counter.epoch, count):
            counter.epoch = epoch
            for loader in loaders:
                loader.set_epoch(epoch)
            begun()
            yield epoch
        counter.epoch = max(counter.epoch, count)
        if self._stepper.waiting:
            self._warnings.warn(
                "waiting",
                "the last micro-batches made no update, because the end of the data was not known in advance: "
                "give the data set a __len__",
            )

    def read(self, data: Any, *, pause: Callable[[], None], epoch_ended: Callable[[Loader], None]) -> Iterator[Any]:
        """Yield the rest of the epoch. `pause` is called between two batches of data that is kept."""
        reading = BatchReading(data)
        known = isinstance(data, Loader)
        batches = data.rest() if known else iter(data)
        reading.left = _batches_left(data)
        # An earlier loop over the same data that was ended by an exception may still be held by the traceback.
        self._readings = [*(other for other in self._readings if other.data is not data), reading]
        trained = known and self._kept.has(data)
        here = self._device.type == "cpu"
        empty = True
        try:
            for batch in self._seeded_per_batch(data, batches) if trained else batches:
                if reading.left is not None:
                    reading.left -= 1
                if known:
                    reading.samples += data.last_total
                    reading.own += data.last_count
                reading.stepped = None
                if trained:
                    self._begin_batch(first=empty)
                    empty = self.found_nothing = False
                self._turn_to(reading)
                yield batch if here else moved(batch, self._device)
                if trained:
                    pause()  # before the next batch is read, after everything that the script does in a step
            if trained:
                self.found_nothing = empty
                epoch_ended(data)
                self._begin_batch(first=False)
        finally:
            self._readings = [other for other in self._readings if other is not reading]
            self._turn_to(self._readings[-1] if self._readings else None)

    def _begin_batch(self, *, first: bool) -> None:
        for call in self._stepper.hooks.before_batch:
            call(first)

    def _seeded_per_batch(self, data: Loader, batches: Iterator[Any]) -> Iterator[Any]:
        """Seed for every batch, from its position in the data and the rank only.

        So a rank that replaces another one, and one that repeats a step, draw the same numbers as without a failure.
        """
        fresh = self._stepper.fresh
        while True:
            epoch, consumed = data.taken
            number = rng.number(self._group.seed, self._placement.rank, epoch, consumed)
            fresh.begin(number, self._device)
            self._group.seed_generator(number + 1)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _turn_to(self, reading: BatchReading | None) -> None:
        self._current = reading
        # A window of micro-batches ends with the epoch: its samples do not wait for the next epoch.
        self._stepper.ends = reading is not None and (
            reading.left == 0 or (len(self._readings) > 1 and any(other.left == 0 for other in self._readings))
        )

    # -- random numbers

    def remember_rng(self) -> None:
        """Store the random state that was just restored: a script may draw before its first epoch."""
        from phalanx.train.checkpoint import randomness

        self._restored = randomness.packed(randomness.taken([self._group.generator]))

    def restore_rng(self) -> None:
        """Restore the stored random state, once."""
        if self._restored is not None:
            from phalanx.train.checkpoint import randomness

            randomness.restore([self._restored], 0, [self._group.generator])
            self._restored = None

    # -- the current batch

    def weighted(self, loss: Any) -> Any:
        """Return the loss of the current batch, weighted by this rank's number of samples."""
        data = self._current.data if self._current is not None else None
        if not isinstance(data, Loader):
            return loss if loss.dim() == 0 else loss.mean()
        if loss.dim() == 0 or loss.numel() == 1:
            if data.tail == "pad" and 0 < data.last_count < data.batch_size:
                self._warnings.warn(
                    "padding",
                    f"{data.batch_size - data.last_count} of this batch's {data.batch_size} samples are padding, and a "
                    'mean loss counts them: run.backward(losses) with one loss per sample (reduction="none")',
                )
            return self._stepper.weights.weigh(loss, data.last_count, data.last_total)
        size = data.last_size
        if loss.shape != (size,):
            raise UsageError(
                f"backward() was given a loss of shape {list(loss.shape)}, for a batch of {size}",
                details=["expected one number, or one per sample"],
                fix="run.backward(loss.mean()), or run.backward(losses.flatten(1).mean(1))",
            )
        return self._stepper.weights.weigh_each(loss, data.last_count, data.last_total)

    def check_weights(self) -> None:
        """Warn if the ranks have different numbers of samples and the loss was not weighted.

        If a whole batch is divided evenly, the part of rank 0 is the largest, so that rank 0 warns for all.
        """
        data = self._current.data if self._current is not None and not self._stepper.scaled else None
        if isinstance(data, Loader) and data.last_count * self._placement.world_size != data.last_total:
            if self._placement.rank and data.length is not None and len(set(data.batches)) == 1:
                return
            self._warnings.warn(
                "weights",
                f"rank {self._placement.rank} has {data.last_count} of this batch's {data.last_total} samples, and "
                "loss.backward() does not take that into account: run.backward(loss) averages by sample",
            )

    def commit(self, opt: Any) -> int:
        """Commit everything read since the last step; return the number of samples of all ranks."""
        samples = 0
        for reading in self._readings:
            if isinstance(reading.data, Loader) and reading.data.train is not False:
                reading.data.commit()
                self._counter.samples = max(self._counter.samples, 0) + reading.own
            samples += reading.samples
            reading.samples = reading.own = 0
        current = self._current
        if current is not None:
            if current.stepped is not None and current.stepped is not opt:
                self._warnings.warn(
                    "commit",
                    "two optimizers have committed a step for the same batch, so a checkpoint between them has only "
                    "one of the updates: run.step(opt, commit=False) for all but the last",
                )
            current.stepped = opt
        return samples

    @property
    def data(self) -> Any:
        """The data from which the current batch was read."""
        return self._current.data if self._current is not None else None

    def loaders(self) -> list[Loader]:
        """Return the loaders that are being read."""
        return [reading.data for reading in self._readings if isinstance(reading.data, Loader)]

    def total_steps(self) -> int | None:
        """Return the number of steps of the whole training, if known."""
        reading, counter = self._current, self._counter
        if reading is None or reading.left is None or counter.epochs is None:
            return None
        window = self._stepper.accumulate
        epochs_left = counter.epochs - counter.epoch - 1
        return counter.steps + -(-reading.left // window) + -(-len(reading.data) // window) * epochs_left


def moved(batch: Any, device: Any) -> Any:
    """Return the batch with all of its tensors on the device."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {name: moved(part, device) for name, part in batch.items()}
    return batch


def _batches_left(data: Any) -> int | None:
    """Return the number of batches to the end of the epoch that has just begun, if known."""
    try:
        whole = len(data)
        if not isinstance(data, Loader):
            return whole
        return count_steps(len(data.dataset) - data.position.consumed, data.batches, data.tail)
    except TypeError:
        return None
