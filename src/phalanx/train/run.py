"""What a training script holds: the group, and the loop around model, data, checkpoints and metrics.

    def train(run: phalanx.Run) -> None:
        model = Net()
        opt = torch.optim.AdamW(model.parameters())
        data = run.loader(dataset, batch_size=64, shuffle=True)
        run.keep(model=model, opt=opt, data=data)
        ddp = run.wrap(model)
        for epoch in run.epochs(10):
            for x, y in run.batches(data):
                loss = loss_fn(ddp(x), y)
                run.backward(loss)
                run.step(opt, loss=loss)

    phalanx.main(train)

A step that `run.step` has returned from is committed: its update, its samples and its metrics count together.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import CHECKPOINT_EVERY, CHECKPOINTS
from phalanx.errors import UsageError
from phalanx.join import ending
from phalanx.join.group import Group
from phalanx.train import chance
from phalanx.train.interval import Interval
from phalanx.train.loader import Loader
from phalanx.train.metrics import Metrics, held, read
from phalanx.train.order import count_steps
from phalanx.train.progress import Progress
from phalanx.train.stepping import Stepper, Update
from phalanx.train.wrap import wrap
from phalanx.train.wrapped import Wrapped

if TYPE_CHECKING:
    from phalanx.train.handover import Past

if TYPE_CHECKING:  # torch's side of them takes most of a second to import: only where there is something to keep
    from phalanx.train.checkpoint.checkpoints import Checkpoints
    from phalanx.train.checkpoint.folder import Info

EVERY = "10m"


@dataclass(slots=True, eq=False)
class Reading:
    """Data that is being read."""

    data: Any
    left: int | None = None  # batches after the one in hand, to the end of the epoch
    samples: int = 0  # of all ranks, since the last commit
    stepped: Any = None  # the optimizer that has committed the batch in hand


class Run(Group):
    steps = 0  # committed, since the very first start of this training
    epoch = 0
    resumed: Info | None = None  # the checkpoint that it goes on from
    generation = 0  # how often the group has formed anew
    past: Past | None = None  # what this process held when the last group was lost
    taken_over = False  # its state is that of a living rank
    committed: Callable[[int], None] | None = None  # told of the first step

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stepper = Stepper(self.world_size)
        self._kept: dict[str, object] = {}
        self._checkpoints: Checkpoints | None = None
        self._due = Interval(None)
        self._ready = False  # what is kept is as it should be
        self._saved = 0  # the step of the newest checkpoint
        self._latest: dict[str, Any] = {}  # metrics of the newest step, where there are checkpoints
        self._readings: list[Reading] = []
        self._reading: Reading | None = None  # whose batch is in hand
        self._metrics: Metrics | None = None
        self._progress: Progress | None = None
        self._values: dict[str, Any] = {}  # of steps that are not committed yet
        self._epochs: int | None = None
        self._random: dict[str, Any] | None = None
        self._warned: set[str] = set()

    # -- model

    def wrap(self, model: Any, how: str = "ddp", **options: Any) -> Wrapped:
        """The module to call in place of `model`: moved to this rank's device, its gradients averaged over all ranks.

        "ddp", "fsdp", or "dp" (one process with several devices); the options are those of `phalanx.train.wrap.wrap`.
        Optimizers may be made before or after, from the model's parameters or from those of what is returned.

        Under `torch.no_grad()` a rank may call it alone, and nobody waits; with "fsdp" all ranks have to, for each has
        a part of the model only.
        """
        wrapped = wrap(model, how, group=self, stepper=self._stepper, **options)
        self._adopt()
        if self.resumed is None:  # else every rank has its own numbers back
            self.seed_apart()
        return wrapped

    def backward(self, loss: Any, **options: Any) -> None:
        """`loss.backward()`, weighed by how many samples this rank has of the batch, and scaled for fp16.

            run.backward(loss)                                           # the mean over the batch
            run.backward(cross_entropy(net(x), y, reduction="none"))     # a loss for every sample

        With `last="pad"` only the second is exact: it leaves out the samples that fill up the last batch.
        The options are those of torch: retain_graph, create_graph.
        """
        reading = self._reading
        data = reading.data if reading is not None else None
        if not isinstance(data, Loader):
            loss = loss if loss.dim() == 0 else loss.mean()
        elif loss.dim() == 0 or loss.numel() == 1:
            if data.last == "pad" and 0 < data.last_count < data.batch_size:
                self._warn(
                    "padding",
                    f"{data.batch_size - data.last_count} of this batch's {data.batch_size} samples are padding, and a "
                    'mean loss counts them: run.backward(losses) with a loss for every sample (reduction="none")',
                )
            loss = self._stepper.weigh(loss, data.last_count, data.last_total)
        else:
            size = len(data.sample_weights)
            if loss.shape != (size,):
                raise UsageError(
                    f"backward() was given a loss of shape {list(loss.shape)}, for a batch of {size}",
                    details=["expected one number, or one for every sample"],
                    fix="run.backward(loss.mean()), or run.backward(losses.flatten(1).mean(1))",
                )
            loss = self._stepper.weigh_each(loss, data.last_count, data.last_total)
        self._stepper.backward(loss, **options)

    # -- data

    def loader(
        self, dataset: Any, *, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """This rank's part of every batch, in an order that does not depend on how many ranks there are."""
        return Loader(dataset, self, batch_size=batch_size, global_batch=global_batch, **options)

    def epochs(self, count: int) -> Iterator[int]:
        """From the epoch that a resumed run was in, to the last.

        One whose batches were all done is entered once more, for what a script does at the end of an epoch.
        """
        self._epochs = count
        loaders = [kept for kept in self._kept.values() if isinstance(kept, Loader)]
        if loaders:
            self.epoch = max(self.epoch, loaders[0].epoch)
        if self._random is not None:
            from phalanx.train.checkpoint import randomness

            # As they were at the checkpoint, whatever the script has drawn since.
            randomness.restore([self._random], 0, [self.generator])
            self._random = None
        for epoch in range(self.epoch, count):
            self.epoch = epoch
            for loader in loaders:
                loader.set_epoch(epoch)
            if self._progress is not None:
                self._progress.title = self._title
            yield epoch
        self.epoch = max(self.epoch, count)
        if self._stepper.waiting:
            self._warn(
                "waiting",
                "the last micro-batches made no update, for nobody could know that they were the last: "
                "give the data set a __len__",
            )

    def batches(self, data: Any) -> Iterator[Any]:
        """The rest of the epoch, on this rank's device.

            for x, y in run.batches(train):     # run.step commits what was read
                ...
            for x, y in run.batches(test):      # no step, so nothing is committed: from its start the next time
                right += (net(x).argmax(1) == y)[: test.last_count].sum()

        A loop may be inside another, to evaluate in mid-epoch. `last_count` leaves out what a rank was given only to
        take part. `data` is of `run.loader`; anything else that can be iterated is read as it is.
        """
        reading = Reading(data)
        batches = iter(data)
        reading.left = _left(data)
        # An earlier loop over it that an exception has ended may still be held by the traceback.
        self._readings = [*(other for other in self._readings if other.data is not data), reading]
        known = isinstance(data, Loader)
        trained = known and any(data is kept for kept in self._kept.values())
        here = self.device.type == "cpu"
        try:
            for batch in batches:
                if reading.left is not None:
                    reading.left -= 1
                if known:
                    reading.samples += data.last_total
                reading.stepped = None
                if trained:
                    self._draw_anew(data)
                self._turn_to(reading)
                yield batch if here else moved(batch, self.device)
        finally:
            self._readings = [other for other in self._readings if other is not reading]
            self._turn_to(self._readings[-1] if self._readings else None)

    def _draw_anew(self, data: Loader) -> None:
        """Torch's numbers for a batch depend on where in the data it is, and on the rank, and on nothing before: so
        that whoever takes the place of another, and whoever does a step again, draws as if nothing had happened."""
        epoch, consumed = data.taken
        number = chance.number(self.seed, self.rank, epoch, consumed)
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(number)

    def _turn_to(self, reading: Reading | None) -> None:
        self._reading = reading
        # A window of micro-batches ends with the epoch: none of its samples waits for the next.
        self._stepper.ends = reading is not None and (
            reading.left == 0 or (len(self._readings) > 1 and any(other.left == 0 for other in self._readings))
        )

    # -- the step

    def step(
        self,
        opt: Any,
        *,
        clip: float | None = None,
        accumulate: int | None = None,
        scheduler: Any = None,
        commit: bool = True,
        **metrics: Any,
    ) -> Update:
        """Update, clear the gradients, and commit: the step, its samples and its metrics count from here on.

        clip        the length of the gradient, of all ranks' samples and shards together
        accumulate  micro-batches to an update; the last of an epoch ends a window that is not full
        scheduler   goes on with every update
        commit      False where more steps follow for the same batch, with whatever optimizer. Only the last one
                    commits: else a checkpoint in between would count a batch whose other updates are not in it.

            run.step(opt_d, commit=False, loss_d=loss_d)
            ...
            run.step(opt_g, loss_g=loss_g)              # one committed step, with both metrics

        What one loss's backward leaves in another optimizer's parameters is cleared by opt_d.zero_grad(), as ever.
        Metrics are written as rank 0 has them; `loss=run.mean(loss)` is that of all ranks.
        """
        reading = self._reading
        if reading is not None and not self._stepper.scaled:
            self._check_weights(reading.data)
        update = self._stepper.step(opt, clip=clip, accumulate=accumulate, scheduler=scheduler)
        if not update.done and not update.skipped:
            return update
        values = held(metrics) if metrics else {}
        if self._values or not commit:
            values = {**self._values, **values}
            self._values = {} if commit else values
        if commit:
            self._commit(opt, values)
        return update

    def _commit(self, opt: Any, values: dict[str, Any]) -> None:
        samples = 0
        for reading in self._readings:
            if isinstance(reading.data, Loader):
                reading.data.commit()
            samples += reading.samples
            reading.samples = 0
        reading_now = self._reading
        if reading_now is not None:
            if reading_now.stepped is not None and reading_now.stepped is not opt:
                self._warn(
                    "commit",
                    "two optimizers have committed a step for one batch, so that a checkpoint between them has only "
                    "one of the updates: run.step(opt, commit=False) for all but the last",
                    deep=1,
                )
            reading_now.stepped = opt
        self.steps += 1
        if self.committed is not None:
            self.committed(self.steps)
            self.committed = None
        if self.is_main:
            if self._progress is None:
                self._begin(values)
            else:
                self._progress.advance(samples, values)
            if self._metrics is not None and values:
                self._metrics.write(self.steps, self.epoch, values)
        if self._checkpoints is not None:
            self._latest = values
            if self._due.passed(self):
                self.checkpoint(**values)

    def _begin(self, values: dict[str, Any]) -> None:
        """After the first step, which is slower than all others: speed is told without it."""
        self._progress = Progress(self._total(), start=self.steps, title=self._title)
        self._progress.advance(0, values, steps=0)
        where = self._checkpoints.folder if self._checkpoints is not None else self.folder
        if where is not None:
            self._metrics = Metrics(where, resumed_at=self.steps - 1)

    @property
    def _title(self) -> str:
        return "" if self._epochs is None else f"epoch {self.epoch + 1}/{self._epochs}"

    def _total(self) -> int | None:
        """Steps of the whole training, if that can be known."""
        reading = self._reading
        if reading is None or reading.left is None or self._epochs is None:
            return None
        window = self._stepper.accumulate
        return (
            self.steps + -(-reading.left // window) + -(-len(reading.data) // window) * (self._epochs - self.epoch - 1)
        )

    def _check_weights(self, data: Any) -> None:
        if isinstance(data, Loader) and data.last_count * self.world_size != data.last_total:
            self._warn(
                "weights",
                f"rank {self.rank} has {data.last_count} of this batch's {data.last_total} samples, which "
                "loss.backward() does not know: run.backward(loss) averages by sample",
                deep=1,
            )

    def _warn(self, about: str, text: str, *, deep: int = 0) -> None:
        """Once, at the script's own line: `deep` functions of ours lie between it and the caller."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=3 + deep)

    def print(self, *args: object, **options: Any) -> None:
        """On rank 0 alone, above the bar if there is one."""
        with self._progress.aside() if self._progress is not None else contextlib.nullcontext():
            super().print(*args, **options)

    # -- what is kept

    def keep(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        every: str | int | None = None,
        last: int = 2,
        best: int = 0,
        metric: str = "loss",
        mode: str = "min",
        **objects: object,
    ) -> Info | None:
        """Name what has to survive: models, optimizers, schedulers, loaders. A checkpoint is restored at once.

        folder   of the checkpoints; not given: PHALANX_CHECKPOINTS, or none are made
        every    100 steps, "10m" minutes; not given: PHALANX_CHECKPOINT_EVERY (`phalanx run --checkpoint-every`) or 10m
        last     so many of the newest are kept, and of the `best` by `metric`

        Before or after models are wrapped; a model and what it was wrapped as are the same thing here. All in one call.
        """
        if not objects:
            raise UsageError("keep() was given nothing to keep", fix="run.keep(model=model, opt=opt, data=data)")
        if self._kept:
            raise UsageError(
                f"keep() was called before, with {', '.join(self._kept)}",
                fix=f"run.keep({', '.join(f'{name}={name}' for name in (*self._kept, *objects))}), once",
            )
        self._kept = dict(objects)
        self._adopt()
        info = self._restored(folder, every, keep_last=last, keep_best=best, best=metric, mode=mode)
        self._ready = True
        return info

    def _restored(self, folder: str | os.PathLike[str] | None, every: str | int | None, **options: Any) -> Info | None:
        environ = environment()
        folder = folder or environ.get(CHECKPOINTS)
        self.taken_over = self._take_over()
        if folder is None:
            if every is not None and self.is_main:
                self._warn(
                    "folder",
                    f"checkpoints every {every}, but no folder to put them in, so that none are made: "
                    'run.keep(folder="checkpoints", …), or phalanx run --checkpoints DIR',
                )
            return None
        from phalanx.train.checkpoint import randomness, state
        from phalanx.train.checkpoint.checkpoints import Checkpoints

        self._due = Interval(every if every is not None else environ.get(CHECKPOINT_EVERY, EVERY))
        self._checkpoints = Checkpoints(folder, self, generators=[self.generator], **options)
        state.taken(self._everything())  # what cannot be kept is told now, and not after the first hundred steps
        self._checkpoints.open()
        info = None if self.taken_over else self._checkpoints.load(self._everything())
        if info is not None:
            self.resumed = info
            epoch = info.extra.get("epoch")
            self.steps, self.epoch = info.step, epoch if isinstance(epoch, int) else 0
            self._saved = self.steps
            self._random = randomness.packed(randomness.taken([self.generator]))
            self.print(f"resumed at step {self.steps}, epoch {self.epoch}")
        return info

    def _take_over(self) -> bool:
        """After a death: from a living rank, for whatever there is on the disk is older."""
        if not self.generation:
            return False
        from phalanx.train.handover import hand_over

        received = hand_over(self, self._everything(), self.past)
        self.past = None
        if received is None:
            return False
        self.steps, self.epoch = received.step, received.epoch
        return True

    def standing(self) -> Past | None:
        """What this rank holds, as of its last committed step. None: it has nothing yet that could be gone on from."""
        from phalanx.train.handover import Past

        return Past(self.steps, self.epoch, self._everything()) if self._ready else self.past

    def abandon(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(super().abandon)
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close, broken=True, patience=0.0)
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            if self._progress is not None:
                stack.callback(self._progress.close)

    def _everything(self) -> Mapping[str, object]:
        return {**self._kept, "phalanx.stepper": self._stepper}

    def _adopt(self) -> None:
        """Optimizers that were made before FSDP, as they are kept: with the parameters that there are now."""
        for kept in self._kept.values():
            if hasattr(kept, "param_groups"):
                self._stepper.adopt(kept)

    def checkpoint(self, **metrics: Any) -> bool:
        """Save now, beside the training. False if earlier ones are still being written and this one was left out.

        In a window of micro-batches, what is saved is the last update: whoever goes on from it repeats the window.
        """
        if self._checkpoints is None:
            raise UsageError(
                "there is no folder for checkpoints", fix='run.keep(folder="checkpoints", model=model, opt=opt)'
            )
        if self._metrics is not None:
            self._metrics.flush()  # whoever goes on from here has all that came before
        (numbers,) = read([held(metrics)])
        saved = self._checkpoints.save(self.steps, self._everything(), {"epoch": self.epoch}, numbers)
        if saved:
            self._saved = self.steps
        return saved

    def export(self, model: Any, path: str | os.PathLike[str]) -> None:
        """The whole model as one file, .safetensors or .pt, with the names of the user's own module."""
        from phalanx.train.checkpoint.export import export

        export(model.module if isinstance(model, Wrapped) else model, path, self)

    # -- the end

    def finish(self) -> None:
        """The training has come to its end: its last steps are in a checkpoint too. `phalanx.main` calls this."""
        if self._checkpoints is not None and self.steps > self._saved:
            self._checkpoints.wait()
            self.checkpoint(**self._latest)

    def close(self, *, failed: bool = False) -> None:
        """Everything that was saved is on the disk afterwards. Raises what went wrong with it."""
        if self.closed or self.pid != os.getpid():  # a fork has no part in its parent's run
            return
        failed = failed or ending.is_failure(sys.exc_info()[1])
        with contextlib.ExitStack() as stack:  # each of them, whatever the others say
            stack.callback(super().close, failed=failed)
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close, broken=failed)
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            if self._progress is not None:
                stack.callback(self._progress.close)


def moved(batch: Any, device: Any) -> Any:
    """A batch with all of its tensors on the device."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {name: moved(part, device) for name, part in batch.items()}
    return batch


def _left(data: Any) -> int | None:
    """Batches to the end of the epoch that was just begun, if that can be known."""
    try:
        whole = len(data)
        if not isinstance(data, Loader):
            return whole
        return count_steps(len(data.dataset) - data.position.consumed, data.batches, data.last)
    except TypeError:
        return None
