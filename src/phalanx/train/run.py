"""`phalanx.Run`: the process group of a training, and the loop around model, data, checkpoints and metrics."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from phalanx.errors import UsageError
from phalanx.train.batch_reader import BatchReader
from phalanx.train.checkpoint_schedule import CheckpointSchedule
from phalanx.train.data.loader import Loader
from phalanx.train.elastic.halting import Halted
from phalanx.train.elastic.recovery_state import RecoveryState, RunParts
from phalanx.train.kept import KeptObjects, TrainingProgress
from phalanx.train.model.wrap import wrap
from phalanx.train.model.wrapped import Wrapped
from phalanx.train.reporting.metrics import held
from phalanx.train.reporting.reporter import RunReporter
from phalanx.train.restoration import Restoration
from phalanx.train.script_warnings import ScriptWarnings
from phalanx.train.snapshot_schedule import SnapshotSchedule
from phalanx.train.stepping import OptimizerUpdate, Stepper
from phalanx.worker.process_group import ending
from phalanx.worker.process_group.group import WorkerProcessGroup

if TYPE_CHECKING:
    from phalanx.train.checkpoint.format.folder import Info
    from phalanx.worker.rendezvous.membership import Membership

T = TypeVar("T")
_SNAPSHOT_PATIENCE = 1.0  # seconds for a snapshot that is nearly complete when the group is lost: it may be the newest


class Run(WorkerProcessGroup):
    """A training run, as one rank sees it. `phalanx.main(train)` calls `train` with it; `phalanx.init()` returns one.

        def train(run: phalanx.Run) -> None:
            model = Net()
            opt = torch.optim.AdamW(model.parameters())
            data = run.loader(dataset, batch_size=64, shuffle=True)
            run.keep(model=model, opt=opt, data=data)        # restores the newest state, if there is one
            ddp = run.wrap(model)
            for epoch in run.epochs(10):
                for x, y in run.batches(data):
                    loss = loss_fn(ddp(x), y)
                    run.backward(loss)
                    run.step(opt, loss=loss)                 # update and commit

        phalanx.main(train)

    A step is committed when `run.step` returns: its update, its samples and its metrics count together. After a failure
    `train` is called again, and continues after the last committed step.

    A run is also the process group: `rank`, `world_size`, `device`, `is_main`, `barrier()`, `mean()`, `gather()` and
    others are inherited from it. It works the same with one process, where nothing is sent.
    """

    resumed: Info | None = None
    """`run.resumed`: the checkpoint that the run was restored from, or None."""

    def __init__(self, membership: Membership, *, seed: int = 0, recovery: RecoveryState | None = None) -> None:
        super().__init__(membership, seed=seed)
        self._recovery = recovery if recovery is not None else RecoveryState()
        self._warnings = ScriptWarnings()
        self._counter = TrainingProgress()
        self._stepper = Stepper(self.world_size)
        self._kept = KeptObjects(self._stepper)
        self._reader = BatchReader(
            membership,
            seed,
            super().generator,
            kept=self._kept,
            counter=self._counter,
            stepper=self._stepper,
            warnings=self._warnings,
        )
        self._reporter = RunReporter(self._counter, self._recovery.generation.hooks.measured)
        self._checkpoints = CheckpointSchedule(self._kept, self._counter, self._reporter.flush)
        self._snapshots = SnapshotSchedule(self._kept, self._counter, self._stepper)
        parts = RunParts(membership, self._kept, self._counter, self._stepper, self._checkpoints, self._snapshots)
        self._recovery.attach(parts)
        self._restoration = Restoration(parts, self._snapshots, self._recovery, self._reader, self._warnings)
        self._uncommitted: dict[str, Any] = {}  # metrics of steps with commit=False

    # -- where the training is

    @property
    def steps(self) -> int:
        """`run.steps`: the number of committed steps since the very first start of the training."""
        return self._counter.steps

    @property
    def epoch(self) -> int:
        """`run.epoch`: the current epoch, counted from 0."""
        return self._counter.epoch

    @property
    def generation(self) -> int:
        """`run.generation`: how often the process group was formed again after a failure; 0 the first time."""
        return self._recovery.generation.number

    @property
    def generator(self) -> torch.Generator:
        """`run.generator`: a random generator for this rank alone, seeded again for every batch."""
        return self._reader.generator

    # -- model

    def once(self, make: Callable[[], T]) -> T:
        """`run.once(make)`: return `make()`, or what it returned before if `train` is called again after a failure.

            def make() -> tuple[Net, torch.optim.Optimizer]:
                model = Net().to(run.device)
                return model, torch.optim.AdamW(model.parameters())

            model, opt = run.once(make)

        A rank that survives keeps its objects, with their device memory and compiled code. Objects are found by the
        order of the calls, so make the same calls each time `train` is called. Do not use it for loaders and wrapped
        models, which belong to one process group. Models that FSDP has sharded are made again too.

        Random numbers drawn afterwards are the same on every rank, whether it has called `make` now or earlier.
        """
        if not callable(make) or isinstance(make, torch.nn.Module):
            raise UsageError(
                f"once() was given a {type(make).__name__}, expected a function that makes the object",
                fix="run.once(make), or run.once(lambda: Net())",
            )
        made = self._recovery.generation.once
        return make() if made is None else made.get(make, self.device)

    def wrap(self, model: Any, how: str = "ddp", **options: Any) -> Wrapped:
        """`ddp = run.wrap(model)`: return the module to call instead of `model`; it averages gradients over all ranks.

        how      "ddp"
                 "fsdp": each rank holds a shard
                 "hsdp": replicas of a sharded model; a lost shard is restored from its replica
                 "dp": one process with several devices
        options  precision, accumulate, compress, compile, ...: see `phalanx.train.model.wrap.wrap`

        The model is moved to this rank's device. Optimizers can be made before or after, from the parameters of the
        model or of the returned module.

        Under `torch.no_grad()` a rank can call the module alone. With "fsdp" and "hsdp" all ranks must call it, because
        each holds only a part of the model.
        """
        equal = self._recovery.layout_for(model, how)
        elastic = self.generation > 0
        wrapped = wrap(model, how, group=self, stepper=self._stepper, equal=equal, elastic=elastic, **options)
        self._kept.adopt()
        if how == "hsdp":
            self._recovery.commit_in_two_phases(self._reader.loaders)
        if self.resumed is None and not self._recovery.from_snapshot:  # else the random state of each rank is restored
            self.seed_apart()
        return wrapped

    def backward(self, loss: Any, **options: Any) -> None:
        """`run.backward(loss)`: call `loss.backward()`, weighted by this rank's samples and scaled for fp16.

            run.backward(loss)                                           # the mean over the batch
            run.backward(cross_entropy(net(x), y, reduction="none"))     # one loss per sample

        With `last="pad"` only the second is exact: it leaves out the padding of the last batch. The options are those
        of torch: retain_graph, create_graph.
        """
        self._stepper.backward(self._reader.weighted(loss), **options)

    # -- data

    def loader(
        self, dataset: Any, *, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """`run.loader(dataset, batch_size=64, shuffle=True)`: return a loader for this rank's part of every batch.

        batch_size    samples per rank
        global_batch  samples of all ranks together, whatever their number; give one of the two
        options       shuffle, last, weights, num_workers, ...: see `phalanx.train.data.loader.Loader`

        The order of the samples does not depend on the number of ranks.
        """
        return Loader(dataset, self, batch_size=batch_size, global_batch=global_batch, **options)

    def epochs(self, count: int) -> Iterator[int]:
        """`for epoch in run.epochs(10)`: iterate from the current epoch, which a resumed run was in, to the last.

        If all batches of that epoch are done, it is entered once more, for what the script does at its end.
        """
        return self._reader.epochs(count, begun=self._reporter.epoch_begun)

    def batches(self, data: Any) -> Iterator[Any]:
        """`for x, y in run.batches(data)`: iterate over the rest of the epoch, on this rank's device.

            for x, y in run.batches(train):     # run.step commits what was read
                ...
            for x, y in run.batches(test):      # without a step nothing is committed: the next loop starts again
                correct += (net(x).argmax(1) == y)[: test.last_count].sum()

        A loop can be inside another one, to evaluate in the middle of an epoch. `last_count` leaves out padding. `data`
        comes from `run.loader`; any other iterable is read as it is.
        """
        return self._reader.read(data, pause=self._halt_if_asked, epoch_ended=self._recovery.epoch_ended)

    # -- steps

    def step(
        self,
        opt: Any,
        *,
        clip: float | None = None,
        accumulate: int | None = None,
        scheduler: Any = None,
        commit: bool = True,
        **metrics: Any,
    ) -> OptimizerUpdate:
        """`run.step(opt, loss=loss)`: update, clear the gradients, and commit the step, its samples and its metrics.

        clip        maximum norm of the gradient, over the samples and shards of all ranks
        accumulate  micro-batches per update; the last one of an epoch always makes an update
        scheduler   a learning rate scheduler, stepped after every update
        commit      False if more steps follow for the same batch, with any optimizer; only the last one commits.
                    A checkpoint in between would count the batch without its other updates.
        metrics     numbers or tensors, written as rank 0 has them; `loss=run.mean(loss)` is the mean over all ranks

            run.step(opt_d, commit=False, loss_d=loss_d)
            ...
            run.step(opt_g, loss_g=loss_g)              # one committed step, with both metrics

        Gradients that one loss leaves in the parameters of another optimizer are yours to clear: opt_d.zero_grad().
        """
        self._halt_if_asked()  # for a script that does not use run.batches
        self._reader.check_weights()
        update = self._stepper.step(opt, clip=clip, accumulate=accumulate, scheduler=scheduler, commit=commit)
        if not update.done and not update.skipped:
            return update
        values = held(metrics) if metrics else {}
        if self._uncommitted or not commit:
            values = {**self._uncommitted, **values}
            self._uncommitted = {} if commit else values
        if commit:
            self._commit(opt, values)
        return update

    def _commit(self, opt: Any, values: dict[str, Any]) -> None:
        counter = self._counter
        samples = self._reader.commit(opt)
        first = counter.steps == counter.start
        if first:
            self._stepper.fresh.settle()
        counter.steps += 1
        self._stepper.torn = False
        if first:
            self._recovery.first_step_committed()
        if self.is_main:
            if self._reporter.bar is None:
                self._reporter.begin(self._reader.total_steps(), self._checkpoints.folder or self.folder, values)
            else:
                self._reporter.committed(samples, values)
        self._checkpoints.committed(self, values)
        self._snapshots.committed(self)

    # -- state

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
        """`run.keep(model=model, opt=opt, data=data)`: name the objects that must survive, and restore them.

        folder   where checkpoints are saved. Default: `phalanx run --checkpoints`; without it, there are none
        every    100: steps; "10m": a time. Default: `phalanx run --checkpoint-every`, or 10m
        last     how many of the newest checkpoints are kept
        best     how many of the best ones by `metric` are kept; `mode` is "min" or "max"

        The state is restored from a living rank, a snapshot in memory or the newest checkpoint. Returns the checkpoint,
        if it was that. Call it once, with all models, optimizers, schedulers and loaders, before or after
        `run.wrap`; a model and its wrapped module count as the same object.
        """
        if not objects:
            raise UsageError("keep() was given nothing to keep", fix="run.keep(model=model, opt=opt, data=data)")
        if self._kept.objects:
            raise UsageError(
                f"keep() was called before, with {', '.join(self._kept.objects)}",
                fix=f"run.keep({', '.join(f'{name}={name}' for name in (*self._kept.objects, *objects))}), once",
            )
        self._kept.add(objects)
        retention = {"keep_last": last, "keep_best": best, "best": metric, "mode": mode}
        self.resumed = info = self._restoration.restore(self, folder, every, retention)
        self._restoration.conclude(self)
        if self._recovery.generation.halt:
            self._checkpoints.find_newest(self)
            self._halt()
        return info

    def on_resize(self, hook: Callable[[int, int], object]) -> None:
        """`run.on_resize(hook)`: let `run.keep` call `hook(before, now)` if the number of ranks has changed.

            run.on_resize(lambda before, now: scale(opt, now / before))     # the learning rate, for example

        It changes when nodes join or leave, or when a checkpoint of a run of another size is resumed. Call this before
        `run.keep`. With `run.loader(global_batch=...)` the global batch stays the same and there is nothing to do; with
        `batch_size=...` the batch of each rank does.
        """
        if self._kept.objects:
            raise UsageError(
                "on_resize() was called after keep(), which calls the hook", fix="run.on_resize(…) before run.keep(…)"
            )
        if not callable(hook):
            raise UsageError(
                f"on_resize() was given a {type(hook).__name__}, expected a function of two numbers of ranks",
                fix="run.on_resize(lambda before, now: …)",
            )
        self._restoration.resize_hook = hook

    def checkpoint(self, **metrics: Any) -> bool:
        """`run.checkpoint()`: save a checkpoint now, in the background.

        Returns False if it was skipped because earlier ones are still being written. Within a window of micro-batches,
        the state after the last update is saved; a run that resumes from it repeats the window.
        """
        return self._checkpoints.save(metrics)

    def export(self, model: Any, path: str | os.PathLike[str]) -> None:
        """`run.export(model, "model.safetensors")`: write the whole model to one file, .safetensors or .pt.

        All ranks must call it. Names are those of your own module.
        """
        from phalanx.train.checkpoint.export import export

        export(model.module if isinstance(model, Wrapped) else model, path, self)

    # -- output

    def print(self, *args: object, **options: Any) -> None:
        """`run.print("text")`: print on rank 0 only, above the progress bar."""
        with self._reporter.aside():
            super().print(*args, **options)

    # -- the end

    def finish(self) -> None:
        """`run.finish()`: save a checkpoint of the last steps. `phalanx.main` calls it when `train` returns."""
        self._reporter.finish()
        self._checkpoints.finish()

    def _halt_if_asked(self) -> None:
        should_halt = self._recovery.generation.hooks.should_halt
        if should_halt is not None and should_halt(self.steps):
            self._halt()

    def _halt(self) -> None:
        """End the training when a checkpoint of the last committed step is on the disk. Without a folder, continue."""
        if self._checkpoints.save_and_wait():
            self._reporter.finish()
            raise Halted(self.steps)

    def close(self, *, failed: bool = False) -> None:
        """`run.close()`: wait until everything is saved, and end the process group. Raises if a save has failed.

        `failed=True` does not wait for other ranks. A run closes by itself at the end of `phalanx.main`, and when the
        process ends.
        """
        if self.closed or self.pid != os.getpid():  # a fork is not part of its parent's run
            return
        failed = failed or ending.is_failure(sys.exc_info()[1])
        with contextlib.ExitStack() as stack:  # each of them is closed, even if another one raises
            stack.callback(super().close, failed=failed)
            stack.callback(self._checkpoints.close, broken=failed)
            stack.callback(self._snapshots.close)
            stack.callback(self._reporter.close)

    def abandon(self, left: Callable[[], None] | None = None, *, held: bool = False) -> None:
        """`run.abandon()`: leave a group that was lost, without waiting for other ranks. Called by `phalanx.main`.

        left  called when the group is gone; writing what was to be saved may take longer
        held  living ranks hold the state, so that no save has to be completed
        """
        handover = self._recovery.generation.handover
        with contextlib.ExitStack() as stack:
            stack.callback(self._recovery.release)
            if handover is not None:
                stack.callback(handover.close)
            stack.callback(self._checkpoints.close, broken=True, patience=0.0, needless=held)
            if left is not None:
                stack.callback(left)
            stack.callback(super().abandon)
            stack.callback(self._snapshots.close, _SNAPSHOT_PATIENCE)
            stack.callback(self._reporter.close)
