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
import functools
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import CHECKPOINT_EVERY, CHECKPOINTS, MEMORY, OFF, RUN, SNAPSHOT_EVERY
from phalanx.errors import CheckpointError, LaunchError, UsageError
from phalanx.train.data import rng
from phalanx.train.data.loader import Loader
from phalanx.train.data.order import count_steps
from phalanx.train.elastic.halting import Halted
from phalanx.train.interval import Interval
from phalanx.train.model.wrap import wrap
from phalanx.train.model.wrapped import Wrapped
from phalanx.train.reporting.measuring import Measuring
from phalanx.train.reporting.metrics import Metrics, held, read
from phalanx.train.reporting.progress import ProgressBar
from phalanx.train.settings import OptimizerSettings
from phalanx.train.stepping import OptimizerUpdate, Stepper
from phalanx.worker.process_group import ending
from phalanx.worker.process_group.group import WorkerProcessGroup

if TYPE_CHECKING:
    from phalanx.contract.worker_messages import MeasuredStep
    from phalanx.train.elastic.handover import Handover
    from phalanx.train.elastic.made_once import Once
    from phalanx.train.elastic.state_offer import StateOffer
    from phalanx.train.elastic.two_phase import TwoPhaseCommit

if TYPE_CHECKING:  # torch's side of them takes most of a second to import: only where there is something to keep
    from phalanx.train.checkpoint.checkpoints import Checkpoints
    from phalanx.train.checkpoint.folder import Info
    from phalanx.train.snapshot.cadence import Cadence
    from phalanx.train.snapshot.snapshots import Snapshots

T = TypeVar("T")
EVERY = "10m"
SNAPSHOTS = "30s"  # the copy of a state of 1 GB takes a tenth of a second
LAST_WORDS = 1.0  # seconds for a snapshot that is nearly there, when the group is lost: it may be the one to go on from
trainings = itertools.count()  # of this process


@dataclass(slots=True, eq=False)
class BatchReading:
    """Data that is being read."""

    data: Any
    left: int | None = None  # batches after the one in hand, to the end of the epoch
    samples: int = 0  # of all ranks, since the last commit
    own: int = 0  # of this one
    stepped: Any = None  # the optimizer that has committed the batch in hand


class Run(WorkerProcessGroup):
    steps = 0  # committed, since the very first start of this training
    epoch = 0
    resumed: Info | None = None  # the checkpoint that it goes on from
    generation = 0  # how often the group has formed anew
    past: StateOffer | None = None  # what this process held when the last group was lost
    handover: Handover | None = None  # in a group that has formed anew
    made: Once | None = None  # where the process may be in more than one
    taken_over = False  # its state is that of a living rank
    recalled = False  # its state comes from a snapshot in memory
    training = 0  # how many there were before, in this process
    regroups = False  # somebody takes the place of a rank that has died
    before = 0  # the newest step that was committed before the last group was lost
    waited = 0.0  # seconds since a checkpoint was due, in the group before
    committed: Callable[[int], None] | None = None  # told of the first step
    keeping: Callable[[str], None] | None = None  # told where checkpoints are
    halting: Callable[[int], bool] | None = None  # asked between steps: whether the run ends there, to go on later
    halts = False  # it ends as soon as what is kept is as it should be
    measured: Callable[[MeasuredStep], None] | None = None  # told now and then, on rank 0
    samples = -1  # of this rank, committed in this generation; -1: nobody counts them

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stepper = Stepper(self.world_size)
        self._two_phase: TwoPhaseCommit | None = None  # where a lost shard comes from its replica
        self._commits = True  # the call of `step` at hand
        self._kept: dict[str, object] = {}
        self._checkpoints: Checkpoints | None = None
        self._due = Interval(None)
        self._snapshots: Snapshots | None = None
        self._snapshot_due: Interval | Cadence = Interval(None)
        self._snapshot_chosen: str | None = None  # the interval that the user asked for
        self._ready = False  # what is kept is as it should be
        self._resized: Callable[[int, int], object] | None = None
        self._saved = 0  # the step of the newest checkpoint
        self._latest: dict[str, Any] = {}  # metrics of the newest step, where there are checkpoints
        self._readings: list[BatchReading] = []
        self._reading: BatchReading | None = None  # whose batch is in hand
        self._metrics: Metrics | None = None
        self._progress: ProgressBar | None = None
        self._measuring: Measuring | None = None
        self._values: dict[str, Any] = {}  # of steps that are not committed yet
        self._epochs: int | None = None
        self._random: dict[str, Any] | None = None
        self._layouts: list[list[list[int]]] = []  # of the models that were wrapped before the group formed anew
        self._laid_out: list[list[list[int]]] = []  # and since: as they are from the second step on
        self._wraps = 0
        self._unequal: list[Any] = []  # models that were wrapped before the state came that they may be part of
        self._ended: tuple[int, Loader, Any, OptimizerSettings] | None = (
            None  # at the end of an epoch: steps, data, its place
        )
        self._began = 0  # the step that this generation began after
        self._warned: set[str] = set()
        self._checks: list[Callable[[], None]] = []  # raise if the group was lost
        self._own = super().generator
        self._number = self._seeded = 0  # what `generator` begins with in this batch; what it has begun with

    # -- model

    def once(self, make: Callable[[], T]) -> T:
        """What `make` returns; where `train` is entered again after a death, what it returned then.

            def make() -> tuple[Net, torch.optim.Optimizer]:
                model = Net().to(run.device)
                return model, torch.optim.AdamW(model.parameters())

            model, opt = run.once(make)

        A rank that survives keeps its objects, and all that hangs on them: memory of the device, compiled code. Things
        are found again by the order of the calls, which has to be the same each time. Not for what belongs to one
        formation of the group: loaders, wrapped models. What FSDP has sharded does too, and is made anew.

        Random numbers go on as if it had been made: what is drawn afterwards is the same in every rank, whether it has
        made it just now or long ago.
        """
        if not callable(make) or isinstance(make, torch.nn.Module):
            raise UsageError(
                f"once() was given a {type(make).__name__}, expected a function that makes what is wanted",
                fix="run.once(make), or run.once(lambda: Net())",
            )
        return make() if self.made is None else self.made.get(make, self.device)

    def wrap(self, model: Any, how: str = "ddp", **options: Any) -> Wrapped:
        """The module to call in place of `model`: moved to this rank's device, its gradients averaged over all ranks.

        "ddp", "fsdp", "hsdp" (replicas of a sharded model: a lost shard comes from its replica), or "dp" (one process
        with several devices); the options are those of `phalanx.train.model.wrap.wrap`.
        Optimizers may be made before or after, from the model's parameters or from those of what is returned.

        Under `torch.no_grad()` a rank may call it alone, and nobody waits; with "fsdp" and "hsdp" all ranks have to,
        for each has a part of the model only.
        """
        equal, elastic = self._equal(model, how), self.generation > 0
        wrapped = wrap(model, how, group=self, stepper=self._stepper, equal=equal, elastic=elastic, **options)
        self._adopt()
        if how == "hsdp" and self.regroups and self.world_size > 1:
            self._commit_in_two_phases()
        if self.resumed is None and not self.recalled:  # else every rank has its own numbers back
            self.seed_apart()
        return wrapped

    def _equal(self, model: Any, how: str) -> list[list[int]] | None:
        """What a living rank has handed over is the same everywhere."""
        if how == "ddp" and self.handover is not None and self.handover.awaited and not self._ready:
            self._unequal.append(model)  # that of rank 0 may be new, and another what all will go on from
            return []
        from phalanx.train.checkpoint.state import unwrapped

        kept = [unwrapped(thing) for thing in self._kept.values() if isinstance(thing, torch.nn.Module)]
        if not (self.taken_over or self.recalled) or not any(thing is model for thing in kept):
            return None
        self._wraps += 1
        return self._layouts[self._wraps - 1] if self._wraps <= len(self._layouts) else []

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
        reading = BatchReading(data)
        batches = iter(data)
        reading.left = _left(data)
        # An earlier loop over it that an exception has ended may still be held by the traceback.
        self._readings = [*(other for other in self._readings if other.data is not data), reading]
        known = isinstance(data, Loader)
        trained = known and any(data is kept for kept in self._kept.values())
        here = self.device.type == "cpu"
        try:
            for batch in self._drawn_anew(data, batches) if trained else batches:
                if reading.left is not None:
                    reading.left -= 1
                if known:
                    reading.samples += data.last_total
                    reading.own += data.last_count
                reading.stepped = None
                self._turn_to(reading)
                yield batch if here else moved(batch, self.device)
                if trained:
                    self._pause()  # before the next is drawn, and after all that the script does in a step
            if trained and self.regroups:
                self._ended = self.steps, data, data.position, OptimizerSettings(self._kept)
        finally:
            self._readings = [other for other in self._readings if other is not reading]
            self._turn_to(self._readings[-1] if self._readings else None)

    def _drawn_anew(self, data: Loader, batches: Iterator[Any]) -> Iterator[Any]:
        """Random numbers for a batch and its step depend on where in the data it is, and on the rank, and on nothing
        before: so that whoever takes the place of another, and whoever does a step again, draws as if nothing had
        happened."""
        fresh = self._stepper.fresh
        while True:
            epoch, consumed = data.taken
            number = rng.number(self.seed, self.rank, epoch, consumed)
            fresh.begin(number, self.device)
            self._number = number + 1
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    @property
    def generator(self) -> torch.Generator:
        """A stream of this rank's own, begun anew with every batch, as all others are; where it is asked for."""
        if self._seeded != self._number:
            self._seeded = self._number
            self._own.manual_seed(self._number)
        return self._own

    def _turn_to(self, reading: BatchReading | None) -> None:
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
    ) -> OptimizerUpdate:
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
        self._pause()  # for a script that reads its data without us
        reading = self._reading
        if reading is not None and not self._stepper.scaled:
            self._check_weights(reading.data)
        self._commits = commit
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

    def _commit_in_two_phases(self) -> None:
        from phalanx.train.elastic.two_phase import TwoPhaseCommit

        self._two_phase = TwoPhaseCommit(self.device, self._check_group)
        self._stepper.before_commit = self._prepare

    def _check_group(self) -> None:
        """Raise if the gradients at hand may be those of a group that was lost."""
        for check in self._checks:
            check()

    def _prepare(self, opt: Any, scheduler: Any) -> None:
        if self._two_phase is None or not self._commits or self._stepper.torn:
            return  # one of several updates of a step, which can only be done again together
        loaders = [reading.data for reading in self._readings if isinstance(reading.data, Loader)]
        self._two_phase.prepare(functools.partial(self._commit_late, opt, scheduler, loaders))

    def _commit_late(self, opt: Any, scheduler: Any, loaders: list[Loader]) -> None:
        """Commit a prepared step after its group was lost: others have committed it."""
        self._stepper.apply(opt, scheduler)
        for loader in loaders:
            loader.commit()
        self.steps += 1
        self._stepper.torn = False

    def _commit(self, opt: Any, values: dict[str, Any]) -> None:
        samples = 0
        for reading in self._readings:
            if isinstance(reading.data, Loader):
                reading.data.commit()
                self.samples = max(self.samples, 0) + reading.own
            samples += reading.samples
            reading.samples = reading.own = 0
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
        if self.steps == self._began:
            self._stepper.fresh.settle()
        self.steps += 1
        self._stepper.torn = False
        if self.committed is not None:
            self.committed(self.steps)
            self.committed = None
        if self.is_main:
            if self._progress is None:
                self._begin(values)
            else:
                self._progress.advance(samples, values)
            waited = self._metrics is not None and bool(values) and self._metrics.write(self.steps, self.epoch, values)
            if self._measuring is not None:
                self._measuring.advance(self.steps, self.epoch, values, waited=waited)
        if self._checkpoints is not None:
            self._latest = values
            if self._due.passed(self):
                self.checkpoint(**values)
        if self._snapshots is not None:
            self._snapshots.committed(self.steps)
            if self.steps == self._began + 1:
                self._laid_out = self._stepper.layouts
                self._adapt()
            if self._snapshot_due.passed(self) or self._snapshots.wanted(self.steps):
                self._snapshots.save(self.steps, self._everything(), {"epoch": self.epoch, "layouts": self._laid_out})

    def _adapt(self) -> None:
        """Where the only copy of a shard is that of its rank, snapshots are as frequent as they are cheap."""
        if self._snapshots is None or self._snapshot_chosen is not None:
            return
        from phalanx.train.model import shard_placement
        from phalanx.train.snapshot.cadence import Cadence

        if shard_placement.is_sharded(self._kept) and not shard_placement.is_replicated(self._kept):
            self._snapshot_due = Cadence(self._snapshots, self._snapshots.say)

    def _begin(self, values: dict[str, Any]) -> None:
        """After the first step, which is slower than all others: speed is told without it."""
        self._progress = ProgressBar(self._total(), start=self.steps, title=self._title)
        self._progress.advance(0, values, steps=0)
        if self.measured is not None:
            self._measuring = Measuring(self.measured, self._progress.total)
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
        self._make_equal()
        before = self._stepper.ranks_before
        if self._resized is not None and before not in (None, self.world_size):
            self._resized(before, self.world_size)
        self._ready, self.past, self._began = True, None, self.steps
        if self._checkpoints is not None and self.keeping is not None:
            self.keeping(self._checkpoints.folder)
        if self.halts:
            newest = self._checkpoints.latest() if self._checkpoints is not None and self.is_main else None
            self._saved = self.broadcast(0 if newest is None else newest.step)
            self.halt()
        return info

    def _make_equal(self) -> None:
        """Models that are wrapped and not kept are those of rank 0, as DDP would have made them."""
        import torch.distributed as dist

        kept = {id(getattr(thing, "module", thing)) for thing in self._kept.values()}
        for model in self._unequal if self.world_size > 1 else ():
            for tensor in (*model.parameters(), *model.buffers()) if id(model) not in kept else ():
                dist.broadcast(tensor.detach(), 0)
        self._unequal = []

    def on_resize(self, hook: Callable[[int, int], object]) -> None:
        """Called by `keep` with the number of ranks before and now, where it is another one than what is kept has seen:
        after nodes have come or gone, or from a checkpoint of a larger run.

            run.on_resize(lambda before, now: scale(opt, now / before))     # the learning rate, say

        With `run.loader(global_batch=…)` the batch of all ranks together stays what it was, and there is nothing to do;
        with `batch_size=…` that of each rank does.
        """
        if self._kept:
            raise UsageError("on_resize() came after keep(), which calls it", fix="run.on_resize(…) before run.keep(…)")
        if not callable(hook):
            raise UsageError(
                f"on_resize() was given a {type(hook).__name__}, expected a function of two numbers of ranks",
                fix="run.on_resize(lambda before, now: …)",
            )
        self._resized = hook

    def _restored(self, folder: str | os.PathLike[str] | None, every: str | int | None, **options: Any) -> Info | None:
        environ = environment()
        folder = folder or environ.get(CHECKPOINTS)
        self.before = self.past.step if self.past is not None else 0
        self.taken_over = self._take_over()
        self._snapshots = self._remembering(environ)
        if folder is None:
            if every is not None and self.is_main:
                self._warn(
                    "folder",
                    f"checkpoints every {every}, but no folder to put them in, so that none are made: "
                    'run.keep(folder="checkpoints", …), or phalanx run --checkpoints DIR',
                    deep=1,
                )
            self._recall()
            return None
        from phalanx.train.checkpoint import state
        from phalanx.train.checkpoint.checkpoints import Checkpoints

        often = every if every is not None else environ.get(CHECKPOINT_EVERY, EVERY)
        self._due = Interval(often, waited=self.waited)
        self._checkpoints = Checkpoints(folder, self, generators=[self.generator], **options)
        state.taken(self._everything())  # what cannot be kept is told now, and not after the first hundred steps
        self._checkpoints.open()
        recalled = self.taken_over or self._recall(self._checkpoints)
        info = None if recalled else self._checkpoints.load(self._everything())
        if info is not None:
            self.resumed = info
            self._go_on(info.step, info.extra)
            self._saved = self.steps
            self.print(f"resumed at step {self.steps}, epoch {self.epoch}")
        return info

    def _remembering(self, environ: Mapping[str, str]) -> Snapshots | None:
        """Snapshots, where somebody holds the memory for them, and would start us again."""
        if RUN not in environ:
            return None
        told = environ.get(SNAPSHOT_EVERY)
        again = self.regroups or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        snapshots = None
        if environ.get(MEMORY) and told not in OFF and (told or again):
            from phalanx.train.snapshot.snapshots import Snapshots
            from phalanx.worker.snapshot_memory import SnapshotMemoryClient

            with contextlib.suppress(LaunchError):
                snapshots = Snapshots(
                    self, SnapshotMemoryClient(environ[MEMORY], str(self.training)), generators=[self.generator]
                )
        waited = snapshots.waited() if snapshots is not None else 0.0
        # Nodes may have been told different things.
        mine = [snapshots is not None, told, waited, self.waited, environ.get(MEMORY, "")]
        offers: list[Any] = self.gather(mine, all=True) or []
        self.waited = max(offer[3] for offer in offers)  # whoever is new does not know
        if snapshots is not None and not all(offer[0] for offer in offers):
            snapshots.close()
            snapshots = None
        if snapshots is not None:
            snapshots.held_in([offer[4] for offer in offers])
            self._snapshot_chosen = offers[0][1]
            self._snapshot_due = Interval(offers[0][1] or SNAPSHOTS, waited=max(offer[2] for offer in offers))
            self._stepper.before_forward = snapshots.forward
            self._stepper.before_update.append(snapshots.update)
        return snapshots

    def _recall(self, checkpoints: Checkpoints | None = None) -> bool:
        """Go on from memory, if it has something newer than the disk."""
        if self._snapshots is None or self.taken_over:
            return False
        if not self.generation and environment().get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return False  # there was nobody before us
        self.before = max(self.gather(max(self.before, self._snapshots.reached()), all=True) or [0])
        found = self._snapshots.newest()
        latest = self.broadcast(checkpoints.latest_step() if self.is_main and checkpoints is not None else -1)
        if found is None or found.step < latest:
            return False
        extra = self._snapshots.load(found, self._everything())
        if extra is None:
            return False
        self.recalled = True
        self._go_on(found.step, extra)
        self._layouts = extra.get("layouts", [])
        self._snapshots.committed(self.steps)
        self.print(f"going on from memory at step {self.steps}, epoch {self.epoch}")
        return True

    def _go_on(self, step: int, extra: Mapping[str, object]) -> None:
        from phalanx.train.checkpoint import randomness

        epoch = extra.get("epoch")
        self.steps, self.epoch = step, epoch if isinstance(epoch, int) else 0
        self._random = randomness.packed(randomness.taken([self.generator]))

    def _take_over(self) -> bool:
        """After a death: from a living rank, for whatever there is on the disk is older."""
        if self.handover is None:
            return False
        received = self.handover.complete(self._everything())
        if received is None:
            return False
        self.steps, self.epoch, self._layouts = received.step, received.epoch, received.layouts
        return True

    def guard(self, call: Callable[[], None]) -> None:
        """Called before each update; raises where there is to be none."""
        if self.device.type == "cuda":  # elsewhere an operation that was aborted raises by itself
            self._stepper.before_update.append(call)
        self._checks.append(call)

    def standing(self, *, asleep: bool = False) -> StateOffer | None:
        """What this rank holds, as of its last committed step. None: it has nothing that could be gone on from.
        `asleep`: the thread that trains is still in the middle of the next one, whose tensors are left alone."""
        from phalanx.train.elastic.state_offer import StateOffer

        if not self._ready:
            return None if self.handover is not None and self.handover.spoilt else self.past
        if self._ended is not None:
            steps, data, position, settings = self._ended
            if (steps, position) == (
                self.steps,
                data.position,
            ):  # that epoch is entered again, for what comes at its end
                settings.put_back()
        pending = self._two_phase.pending if self._two_phase is not None else None
        for kept in self._kept.values() if not asleep else ():  # a step that came to nothing leaves nothing
            for part in kept.modules() if isinstance(kept, torch.nn.Module) else ():
                if hasattr(part, "reshard"):  # FSDP's, which may have been whole just now
                    part.reshard()
            if pending is None and hasattr(kept, "zero_grad"):
                kept.zero_grad(set_to_none=True)
        # DDP lays out its buckets anew after a step: one that came to nothing does not count.
        layouts = self._layouts
        if self.steps > self._began:
            layouts = self._laid_out if asleep else self._stepper.layouts
        settings = OptimizerSettings(self._kept)
        return StateOffer(
            self.steps, self.epoch, self._everything(), layouts, self.rank, self.world_size, settings, pending
        )

    @property
    def remembers(self) -> bool:
        """What is in memory is found by those who come after us."""
        return self._snapshots is not None

    @property
    def waiting(self) -> float:
        """As `waited` of the next group: were each to begin anew, with many deaths no checkpoint would ever be due."""
        return self._due.waited if self._ready else self.waited

    def abandon(self, left: Callable[[], None] | None = None, *, held: bool = False) -> None:
        """`left` is called when the group is no more: what was to be saved may take longer to write. `held`: living
        ranks have it, so that it is not waited for."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget_checks)
            if self.handover is not None:
                stack.callback(self.handover.close)
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close, broken=True, patience=0.0, needless=held)
            if left is not None:
                stack.callback(left)
            stack.callback(super().abandon)
            if self._snapshots is not None:
                stack.callback(self._snapshots.close, LAST_WORDS)
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            if self._progress is not None:
                stack.callback(self._progress.close)

    def _forget_checks(self) -> None:
        """They refer to this object, which would keep its connections until the garbage collector comes."""
        self._checks.clear()
        self._stepper.before_update.clear()
        self._stepper.before_commit = self._two_phase = None

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
        if self._measuring is not None:
            self._measuring.close()
        if self._checkpoints is not None and self.steps > self._saved:
            self._checkpoints.wait()
            self.checkpoint(**self._latest)

    def _pause(self) -> None:
        if self.halting is not None and self.halting(self.steps):
            self.halt()

    def halt(self) -> None:
        """Ends the training here. A checkpoint of the last committed step is on the disk by then; without a folder for
        it, the training goes on."""
        if self._checkpoints is None:
            return
        if self.steps != self._saved:
            with contextlib.suppress(CheckpointError):  # of one before it
                self._checkpoints.wait()
            self.checkpoint(**self._latest)
        self._checkpoints.wait()
        if self._measuring is not None:
            self._measuring.close()
        raise Halted(self.steps)

    @property
    def torn(self) -> bool:
        """An update has begun whose step is not committed: what is kept belongs to no step."""
        return self._stepper.torn

    def close(self, *, failed: bool = False) -> None:
        """Everything that was saved is on the disk afterwards. Raises what went wrong with it."""
        if self.closed or self.pid != os.getpid():  # a fork has no part in its parent's run
            return
        failed = failed or ending.is_failure(sys.exc_info()[1])
        with contextlib.ExitStack() as stack:  # each of them, whatever the others say
            stack.callback(super().close, failed=failed)
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close, broken=failed)
            if self._snapshots is not None:
                stack.callback(self._snapshots.close)
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
