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

import os
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import CHECKPOINT_EVERY, CHECKPOINTS
from phalanx.errors import UsageError
from phalanx.join.group import Group
from phalanx.train.checkpoint.checkpoints import Checkpoints
from phalanx.train.checkpoint.export import export
from phalanx.train.checkpoint.folder import Info
from phalanx.train.interval import Interval
from phalanx.train.loader import Loader
from phalanx.train.metrics import Metrics
from phalanx.train.progress import Progress
from phalanx.train.stepping import Stepper, Update
from phalanx.train.wrap import wrap
from phalanx.train.wrapped import Wrapped


class Run(Group):
    steps = 0  # committed, since the very first start of this training
    epoch = 0
    resumed: Info | None = None  # the checkpoint that it goes on from

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stepper = Stepper()
        self._kept: dict[str, object] = {}
        self._checkpoints: Checkpoints | None = None
        self._due = Interval(None)
        self._loader: Loader | None = None  # whose batch is in hand
        self._metrics: Metrics | None = None
        self._progress: Progress | None = None
        self._samples = 0  # of this update
        self._total: int | None = None

    # -- model

    def wrap(self, model: Any, how: str = "ddp", **options: Any) -> Wrapped:
        """The module to call in place of `model`: moved to this rank's device, its gradients averaged over all ranks.

        "ddp", "fsdp", or "dp" (one process with several devices); the options are those of `phalanx.train.wrap.wrap`.
        """
        wrapped = wrap(model, how, group=self, stepper=self._stepper, **options)
        if self.resumed is None:  # else every rank has its own numbers back
            self.seed_apart()
        return wrapped

    def backward(self, loss: Any) -> None:
        """`loss.backward()`, weighed by how many samples this rank has of the batch, and scaled for fp16."""
        loader = self._loader
        if loader is not None and loader.last_total:
            loss = self._stepper.weigh(loss, loader.last_count, loader.last_total)
        self._stepper.backward(loss)

    # -- data

    def loader(
        self, dataset: Any, *, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """This rank's part of every batch, in an order that does not depend on how many ranks there are."""
        return Loader(dataset, self, batch_size=batch_size, global_batch=global_batch, **options)

    def epochs(self, count: int) -> Iterator[int]:
        """From the epoch that a resumed run was in, to the last."""
        loaders = [kept for kept in self._kept.values() if isinstance(kept, Loader)]
        if loaders:
            self.epoch = loaders[0].epoch
            self._total = _total(loaders[0], count)
        for epoch in range(self.epoch, count):
            self.epoch = epoch
            for loader in loaders:
                loader.set_epoch(epoch)
            yield epoch
        self.epoch = count

    def batches(self, loader: Loader) -> Iterator[Any]:
        """The rest of the epoch, on this rank's device."""
        self._begin()
        try:
            for batch in loader:
                self._loader = loader
                yield moved(batch, self.device)
        finally:
            self._loader = None

    # -- the step

    def step(
        self,
        opt: Any,
        *,
        clip: float | None = None,
        accumulate: int | None = None,
        scheduler: Any = None,
        **metrics: Any,
    ) -> Update:
        """Update, and commit: the step, its samples and its metrics count from here on."""
        update = self._stepper.step(opt, clip=clip, accumulate=accumulate, scheduler=scheduler)
        loader = self._loader
        if loader is not None:
            self._samples += loader.last_total
        if not update.done and not update.skipped:
            return update
        if loader is not None:
            loader.commit()
        self.steps += 1
        # Read later, or never: to read a value of a GPU here would be to wait for it.
        metrics = {name: value.detach() if hasattr(value, "detach") else value for name, value in metrics.items()}
        self._begin()
        if self._progress is not None:
            self._progress.advance(self._samples, metrics)
        if self._metrics is not None and metrics:
            self._metrics.write(self.steps, self.epoch, metrics)
        self._samples = 0
        if self._checkpoints is not None and self._due.passed(self):
            self.checkpoint(**metrics)
        return update

    def _begin(self) -> None:
        """Progress and metrics, of rank 0, from the first step on."""
        if self._progress is not None:
            return
        self._progress = Progress(self._total, start=self.steps, shown=self.is_main)
        where = self._checkpoints.folder if self._checkpoints is not None else self.folder
        if self.is_main and where is not None:
            self._metrics = Metrics(where, resumed_at=self.steps)

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
        every    100 steps, "10m" minutes; not given: PHALANX_CHECKPOINT_EVERY (`phalanx run --checkpoint-every`)
        last     so many of the newest are kept, and of the `best` by `metric`
        """
        if not objects:
            raise UsageError("keep() was given nothing to keep", fix="run.keep(model=model, opt=opt, data=data)")
        self._kept = dict(objects)
        environ = environment()
        folder = folder or environ.get(CHECKPOINTS)
        self._due = Interval(every if every is not None else environ.get(CHECKPOINT_EVERY))
        if folder is None:
            return None
        self._checkpoints = Checkpoints(folder, self, keep_last=last, keep_best=best, best=metric, mode=mode)
        info = self._checkpoints.load(self._everything())
        if info is not None:
            self.resumed = info
            epoch = info.extra.get("epoch")
            self.steps, self.epoch = info.step, epoch if isinstance(epoch, int) else 0
            self.print(f"resumed at step {self.steps}, epoch {self.epoch}")
        return info

    def _everything(self) -> Mapping[str, object]:
        return {**self._kept, "phalanx.stepper": self._stepper}

    def checkpoint(self, **metrics: Any) -> bool:
        """Save now, beside the training. False if earlier ones are still being written and this one was left out."""
        if self._checkpoints is None:
            raise UsageError(
                "there is no folder for checkpoints", fix='run.keep(folder="checkpoints", model=model, opt=opt)'
            )
        if self._metrics is not None:
            self._metrics.flush()  # whoever goes on from here has all that came before
        numbers = {name: float(value) for name, value in metrics.items()}
        return self._checkpoints.save(self.steps, self._everything(), {"epoch": self.epoch}, numbers)

    def export(self, model: Any, path: str | os.PathLike[str]) -> None:
        """The whole model as one file, .safetensors or .pt, with the names of the user's own module."""
        export(model.module if isinstance(model, Wrapped) else model, path, self)

    # -- the end

    def close(self, *, failed: bool = False) -> None:
        """Everything that was saved is on the disk afterwards. Raises what went wrong with it."""
        if self.closed:
            return
        try:
            if self._progress is not None:
                self._progress.close()
            if self._metrics is not None:
                self._metrics.close()
            if self._checkpoints is not None:
                self._checkpoints.close(broken=failed)
        finally:
            super().close(failed=failed)


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


def _total(loader: Loader, epochs: int) -> int | None:
    try:
        return len(loader) * epochs
    except TypeError:
        return None
