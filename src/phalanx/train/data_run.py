"""The data part of the training API: loaders, epochs, batches and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from phalanx.train import evaluation
from phalanx.train.arguments import check_batches, check_dataset, check_epochs
from phalanx.train.batch_reader import BatchReader
from phalanx.train.data.loader import Loader
from phalanx.train.data.loader_options import options_of
from phalanx.train.misuse.checks import MisuseChecks
from phalanx.train.stateful_run import StatefulRun


class DataRun(StatefulRun):
    """The state and the data of a training. `Run` makes the parts that this uses."""

    _reader: BatchReader
    _misuse: MisuseChecks

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
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
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        sampler: None = None,
        batch_sampler: None = None,
    ) -> Loader:
        """`run.loader(dataset, batch_size=64, shuffle=True)`: return a loader for this rank's part of every batch.

            train = run.loader(train_set, batch_size=64, shuffle=True)
            test = run.loader(test_set, batch_size=64, train=False)      # every sample exactly once
            train = run.loader(loader, global_batch=64)                  # of a torch DataLoader: its data set, options

        - `batch_size`: samples per rank
        - `global_batch`: samples of all ranks together, whatever their number; give one of the two
        - `train`: False for evaluation: in order, nothing dropped, no padding. Default: True with shuffle, drop_last or
          pad_last; without them, False when it is read under `torch.no_grad()`
        - `shuffle`: shuffle every epoch. Default: False
        - `drop_last`: drop the last samples, which do not fill a global batch. Default: True with shuffle=True or
          train=True, else False: the last batches are smaller
        - `pad_last`: pad the last batches with samples that must not count, see `backward`. Default: False
        - `weights`: one number per rank: a rank with 0.5 takes half as many samples as one with 1
        - `seed`: of the order. Default: that of the run

        The others are those of torch's DataLoader. A sampler is refused: the loader divides the samples itself. Their
        order does not depend on the number of ranks. In place of a data set it takes a DataLoader, whose batch_size is
        that of each rank if neither `batch_size` nor `global_batch` is given.
        """
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "global_batch": global_batch,
            "train": train,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "pad_last": pad_last,
            "weights": weights,
            "seed": seed,
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "generator": generator,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
        }
        check_dataset(dataset)
        if isinstance(dataset, DataLoader):
            dataset, options = dataset.dataset, options_of(dataset, options)
        loader = Loader(dataset, self._group, **options)
        loader.read_through(self.batches)
        return loader

    def epochs(self, count: int) -> Iterator[int]:
        """`for epoch in run.epochs(10)`: iterate from the current epoch, which a resumed run was in, to the last.

        If all batches of that epoch are done, it is entered once more, for what the script does at its end.
        """
        self._complete_restore()
        for epoch in self._reader.epochs(check_epochs(count), begun=self._epoch_begun):
            yield epoch
            self._checkpoints.epoch_ended(self._group, epoch)
        self._kept.values.commit()

    def batches(self, data: Any) -> Iterator[Any]:
        """`for x, y in run.batches(data)`: iterate over the rest of the epoch, on this rank's device.

            for x, y in run.batches(train):     # run.step commits what was read
                ...
            for x, y in run.batches(test):      # without a step nothing is committed: the next loop starts again
                correct += int((net(x).argmax(1) == y).sum())
            accuracy = run.group.sum(correct) / len(test_set)

        A loop can be inside another one, to evaluate in the middle of an epoch. With `pad_last` and `drop_last=False`
        the first `data.last_count` samples count, and the rest is padding. `data` comes from `run.loader`; any other
        iterable is read as it is. `for x, y in data` is the same for a loader of `run.loader`.
        """
        check_batches(data)
        self._complete_restore()
        self._misuse.reading()
        self._reporter.settle()
        return self._reader.read(data, pause=self._batch_done, epoch_ended=self._data_ended)

    def _epoch_begun(self) -> None:
        self._kept.values.commit()  # values that the script has set at the end of the last epoch are final now
        self._reporter.epoch_begun()

    def _batch_done(self) -> None:
        self._misuse.batch_done()
        self._kept.values.commit_after_step()
        self._halt_if_asked()

    def _data_ended(self, data: Loader) -> None:
        self._reporter.settle()
        self._recovery.epoch_ended(data)

    def evaluate(self, data: Loader, measure: Callable[..., Mapping[str, Any]]) -> dict[str, Any]:
        """`run.evaluate(test, measure)`: return the means of all that `measure` returns, over the samples of all ranks.

            def measure(x, y):
                output = ddp(x)
                return {"loss": loss_fn(output, y), "accuracy": output.argmax(1) == y}

            test = run.loader(test_set, batch_size=64, train=False)
            run.print(run.evaluate(test, measure))       # {"samples": 301, "loss": 0.21, "accuracy": 0.94}

        `measure` gets a batch and returns a dict: numbers, which are means of the batch, and tensors with one value per
        sample. Models that are wrapped or kept are in evaluation mode meanwhile, without gradients. All ranks must call
        it; they wait for each other only at its end, and get the same result, at any number of ranks.
        """
        data = evaluation.check(data, measure, kept=self._kept.has(data))
        means = evaluation.MeanOverSamples()
        with evaluation.evaluating(self._kept.models):
            for batch in self.batches(data):
                means.add(evaluation.measure_batch(measure, batch), data.last_count, data.last_size)
        return evaluation.merge(self._group.gather(means.totals(), all=True) or [])

    def _halt_if_asked(self) -> None:
        should_halt = self._recovery.generation.hooks.should_halt
        if should_halt is not None and should_halt(self._counter.steps):
            self._halt()
