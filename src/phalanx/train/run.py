"""`phalanx.Run`: the training API: the loop around model, data, checkpoints and metrics."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from phalanx.cluster.sources.surroundings import environment
from phalanx.collectives import mismatch
from phalanx.collectives.errors import LeftEarly
from phalanx.contract.variables import ON_NAN
from phalanx.errors import UsageError
from phalanx.train.arguments import check_group, check_loss, check_model, check_step
from phalanx.train.batch_reader import BatchReader
from phalanx.train.data_run import DataRun
from phalanx.train.elastic.halting import Halted
from phalanx.train.elastic.recovery_state import RecoveryState, RunParts
from phalanx.train.kept.agreement import Agreement
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.misuse.checks import MisuseChecks
from phalanx.train.model.compression import Compress
from phalanx.train.model.sharding import Policy
from phalanx.train.model.wrap import wrap
from phalanx.train.model.wrapped import Wrapped
from phalanx.train.non_finite_guard import NonFiniteGuard, checked_policy
from phalanx.train.reporting.metrics import held
from phalanx.train.reporting.rank_log import RankLog
from phalanx.train.reporting.reporter import RunReporter
from phalanx.train.reporting.trackers import LogTo
from phalanx.train.reporting.trackers import trackers as named_trackers
from phalanx.train.restoration import Restoration
from phalanx.train.schedule.checkpoint_schedule import CheckpointSchedule
from phalanx.train.schedule.snapshot_schedule import SnapshotSchedule
from phalanx.train.script_warnings import ScriptWarnings
from phalanx.train.stepping.stepper import OptimizerUpdate, Stepper
from phalanx.worker import ending
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.rendezvous.store import Store

T = TypeVar("T")
_SNAPSHOT_PATIENCE = 1.0  # seconds for a nearly complete snapshot when the group is lost: it may be the newest


class Run(DataRun):
    """A training run, as one rank sees it. `phalanx.main(train)` calls `train` with it.

        def train(run: phalanx.Run) -> None:
            model = Net()
            opt = torch.optim.AdamW(model.parameters())
            data = run.loader(dataset, batch_size=64, shuffle=True)
            run.keep(model, opt, data, best=0.0)             # restores the newest state, if there is one
            ddp = run.wrap(model)
            for epoch in run.epochs(10):
                for x, y in run.batches(data):
                    loss = loss_fn(ddp(x), y)
                    run.backward(loss)
                    run.step(opt, loss=loss)                 # update and commit
                accuracy = evaluate(ddp)
                run.log(accuracy=accuracy)
                run.state["best"] = max(accuracy, run.state["best"])

        phalanx.main(train)

    A step is committed when `run.step` returns: its update, its samples and its metrics count together. After a failure
    `train` is called again, and continues after the last committed step.

    The process group is `run.group`: `run.group.barrier()`, `run.group.mean(x)`, `run.group.local_rank` and others. It
    works the same with one process, where nothing is sent.

    Without `phalanx.main`, make a run of the group: `run = phalanx.Run(phalanx.init())`. Close it with
    `run.group.close()`, or use it in a `with` statement; without, it is closed when the process ends. `log_to` is that
    of `phalanx.main`, which also gives `recovery`: what it knows about the groups before this one.
    """

    def __init__(
        self,
        group: WorkerProcessGroup,
        *,
        log_to: LogTo | Sequence[LogTo] | None = None,
        recovery: RecoveryState | None = None,
    ) -> None:
        trackers = named_trackers(log_to)
        check_group(group)
        membership = group.membership
        self._group = group
        self._recovery = recovery if recovery is not None else RecoveryState()
        warnings = ScriptWarnings()
        self._counter = TrainingProgress()
        self._stepper = Stepper(self.world_size)
        self._kept = KeptObjects(self._stepper)
        self._reader = BatchReader(
            group, kept=self._kept, counter=self._counter, stepper=self._stepper, warnings=warnings
        )
        self._reporter = RunReporter(
            self._counter,
            self._recovery.generation.hooks.measured,
            folder=lambda: self._checkpoints.folder or group.folder,
            rank_log=self._make_rank_log() if self.world_size > 1 else None,
            rank=self.rank,
            trackers=trackers,
        )
        self._checkpoints = CheckpointSchedule(self._kept, self._counter, self._reporter.flush)
        self._snapshots = SnapshotSchedule(self._kept, self._counter, self._stepper)
        parts = RunParts(membership, self._kept, self._counter, self._stepper, self._checkpoints, self._snapshots)
        self._recovery.attach(parts)
        self._agreement = Agreement(self._kept, self._recovery.reference)
        self._restoration = Restoration(parts, self._snapshots, self._recovery, self._reader, warnings)
        self._uncommitted: dict[str, Any] = {}  # metrics of steps with commit=False
        self._guard = self._make_guard()
        survives = self._recovery.generation.regroups and not self._recovery.generation.number
        self._misuse = MisuseChecks(membership, self._kept, warnings, survives=survives)
        if self.world_size > 1:
            self._stepper.hooks.first_forward = self._misuse.first_forward
        group.print_inside(self._reporter.aside)
        group.closing.first(self._close)

    def _make_rank_log(self) -> RankLog:
        membership = self._group.membership
        stores = (membership.lasting_store, membership.store)
        lasting, own = (Store(store.at("metrics"), membership.timeout) for store in stores)
        return RankLog(
            lasting, self.rank, self.world_size, generation=self._recovery.generation.number, group_store=own
        )

    def _make_guard(self) -> NonFiniteGuard | None:
        """Return the object that checks updates, if `--on-nan` requires it."""
        policy = checked_policy(environment().get(ON_NAN))
        if policy == "report":
            return None
        guard = NonFiniteGuard(
            policy,
            self.device,
            self.world_size,
            kept=self._kept,
            counter=self._counter,
            save=self._save_last_step,
        )
        self._stepper.hooks.guard = guard
        self._stepper.hooks.before_forward.append(guard.before_forward)
        return guard

    # -- where the training is

    @property
    def steps(self) -> int:
        """`run.steps`: the number of committed steps since the very first start of the training."""
        return self._counter.steps

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

    def wrap(
        self,
        model: Any,
        how: str = "ddp",
        *,
        precision: str | None = None,
        accumulate: int = 1,
        compile: bool = False,  # noqa: A002
        compress: Compress = None,
        static_graph: bool = False,
        find_unused: bool = False,
        sync_batchnorm: bool = False,
        shard: Policy = None,
        shards: int | None = None,
    ) -> Wrapped:
        """`ddp = run.wrap(model)`: return the module to call instead of `model`; it averages gradients over all ranks.

        - `how`: "ddp"; "fsdp": each rank holds a shard; "hsdp": replicas of a sharded model, so that a lost shard is
          restored from its replica; "dp": one process with several devices
        - `precision`: "bf16", or "fp16" with a scaled loss: run.backward(loss). Default: that of the model
        - `accumulate`: micro-batches per step; gradients are averaged once per step. Default: 1
        - `compile`: compile the model with torch.compile
        - `compress`: compress gradients of DDP: "fp16", "bf16", "powersgd" or PowerSGD(rank=2, start=1000)
        - `static_graph`: every step uses the same parameters, so that DDP can plan ahead
        - `find_unused`: not every step uses all parameters: DDP finds out which
        - `sync_batchnorm`: batch statistics over all ranks, not per rank
        - `shard`: which parts FSDP gathers together: a class, or a function of a module. Default: the children
        - `shards`: "hsdp": ranks per replica. Default: the ranks of a node; with one node, half of them

        The model is moved to this rank's device. Optimizers can be made before or after, from the parameters of the
        model or of the returned module.

        Under `torch.no_grad()` a rank can call the module alone. With "fsdp" and "hsdp" all ranks must call it, because
        each holds only a part of the model.
        """
        check_model(model)
        unequal = self._agreement.compare_model(self._group, model)
        equal = self._recovery.begin_wrap(model, how)
        wrapped = wrap(
            model,
            how,
            group=self._group,
            stepper=self._stepper,
            accumulate=accumulate,
            precision=precision,
            compile=compile,
            compress=compress,
            static_graph=static_graph,
            find_unused=find_unused,
            sync_batchnorm=sync_batchnorm,
            shard=shard,
            shards=shards,
            equal=equal,
            unequal=unequal,
            elastic=self._recovery.generation.number > 0,
        )
        self._model_wrapped()
        self._misuse.wrapped()
        if how == "hsdp":
            self._recovery.commit_in_two_phases(self._reader.loaders)
        # otherwise the random state of each rank is restored
        if self._resumed is None and not self._recovery.from_snapshot:
            self._group.seed_apart()
        return wrapped

    def backward(self, loss: Any, *, retain_graph: bool | None = None, create_graph: bool = False) -> None:
        """`run.backward(loss)`: call `loss.backward()`, weighted by this rank's samples and scaled for fp16.

            run.backward(loss)                                           # the mean over the batch
            run.backward(cross_entropy(net(x), y, reduction="none"))     # one loss per sample

        With `pad_last=True` only the second is exact: it leaves out the padding of the last batch. `retain_graph`
        and `create_graph` are torch's.
        """
        check_loss(loss)
        if self._guard is not None:
            self._guard.add_loss(loss)
        self._stepper.backward(self._reader.weighted(loss), retain_graph=retain_graph, create_graph=create_graph)

    # -- steps

    def step(
        self,
        opt: Any,
        loss: Any = None,
        *,
        clip: float | None = None,
        accumulate: int | None = None,
        scheduler: Any = None,
        commit: bool = True,
        **metrics: Any,
    ) -> OptimizerUpdate:
        """`run.step(opt, loss=loss)`: update, clear the gradients, and commit the step, its samples and its metrics.

        - `loss`: a metric, as any other; it can be given by position
        - `clip`: maximum norm of the gradient, over the samples and shards of all ranks
        - `accumulate`: micro-batches per update; the last one of an epoch always makes an update
        - `scheduler`: a learning rate scheduler, stepped after every update
        - `commit`: False if more steps follow for the same batch, with any optimizer; only the last one commits. A
          checkpoint in between would count the batch without its other updates.
        - `metrics`: numbers or tensors of one number, written as rank 0 has them. `loss=run.group.mean(loss)`: the mean
          over all ranks

            run.step(opt_d, commit=False, loss_d=loss_d)
            ...
            run.step(opt_g, loss_g=loss_g)              # one committed step, with both metrics

        Gradients that one loss leaves in the parameters of another optimizer are yours to clear: opt_d.zero_grad().
        """
        check_step(opt, clip, scheduler)
        if loss is not None:
            metrics = {"loss": loss, **metrics}
        self._halt_if_asked()  # for a script that does not use run.batches
        self._reader.check_weights()
        if not self._misuse.done:
            self._misuse.stepping(opt)
        if not self._agreement.complete and self._stepper.models:
            self._agreement.compare_data(self._group, self._reader.data)
        if self._guard is not None:
            self._guard.check_stopped()
            self._guard.add_metrics(metrics)
        update = self._stepper.step(opt, clip=clip, accumulate=accumulate, scheduler=scheduler, commit=commit)
        if not update.done and not update.skipped:
            return update
        values = held(metrics) if metrics else {}
        if self._uncommitted or not commit:
            values = {**self._uncommitted, **values}
            self._uncommitted = {} if commit else values
        dropped = self._guard.latest if self._guard is not None else None
        if commit:
            self._commit(opt, values, reported=dropped is not None)
        if dropped is not None:
            self._report_skipped(self.steps if commit else self.steps + 1, *dropped)
        return update

    def _report_skipped(self, step: int, what: str, seconds: float) -> None:
        report = self._recovery.generation.hooks.batch_skipped
        if self._group.is_main and report is not None:
            report(step, what, seconds)
        elif report is None:
            self.print(f"phalanx: step {step}: {what}: its update was dropped and its batch skipped")

    def _commit(self, opt: Any, values: dict[str, Any], *, reported: bool = False) -> None:
        """Commit a step. `reported`: non-finite values in its metrics are already reported."""
        counter = self._counter
        samples = self._reader.commit(opt)
        if not self._misuse.done:
            saved = self._checkpoints.folder is not None and not self._recovery.generation.number
            self._misuse.committed(self._reader.data, self._reader.loaders(), idle=self._stepper.idle, saved=saved)
        first = counter.steps == counter.start
        if first:
            self._stepper.fresh.settle()
        self._kept.values.commit(stepped=True)
        counter.steps += 1
        self._stepper.torn = False
        if first:
            self._recovery.first_step_committed()
        if self._group.is_main:
            if self._reporter.bar is None:
                self._reporter.begin(self._reader.total_steps(), values, reported=reported)
            else:
                self._reporter.committed(samples, values, reported=reported)
        else:
            self._reporter.post()
        self._checkpoints.committed(self._group, values)
        self._snapshots.committed(self._group)

    # -- the end

    def _finish(self) -> bool:
        """Save a checkpoint of the last steps. `phalanx.main` calls it when `train` returns.

        Return False if it could not be written: the training is complete, and `close` raises the error.
        """
        if self._guard is not None:
            self._guard.check_stopped()
        self._complete_restore()
        self._reporter.finish()
        try:
            with mismatch.ending():
                return self._checkpoints.finish(self._group)
        except LeftEarly:  # the others report that they have lost this rank
            self._group.close(failed=True)
            return True

    def _save_last_step(self) -> int | None:
        """Save a checkpoint of the last committed step, in the middle of the next. None: there are no checkpoints, or
        an optimizer has made its update of the next step."""
        if self._stepper.torn:
            return None
        values = self._kept.values
        values.replace(values.committed.state_dict())
        return self._checkpoints.save_and_wait(self._group)

    def _close(self, failed: bool) -> None:
        """Wait until everything is saved. The process group calls it when it closes. Raises if a save has failed."""
        with contextlib.ExitStack() as stack:  # close each of them, even if another one raises
            stack.enter_context(contextlib.suppress(LeftEarly))  # as in `_finish`
            stack.enter_context(mismatch.ending())
            stack.callback(self._checkpoints.close, broken=failed)
            stack.callback(self._misuse.unhook if failed else self._misuse.close)
            stack.callback(self._snapshots.close)
            stopped = ending.is_interrupted() or isinstance(sys.exc_info()[1], Halted)
            stack.callback(self._reporter.close, "stopped" if stopped else "failed" if failed else "done")

    def _abandon(self, left: Callable[[], None] | None = None, *, has_state: bool = False) -> None:
        """Leave a group that was lost, without waiting for other ranks. Called by `phalanx.main`.

        left       called when the group is left; writing pending saves may take longer
        has_state  live ranks have the state, so no save has to be completed
        """
        handover = self._recovery.generation.handover
        with contextlib.ExitStack() as stack:
            stack.callback(self._recovery.release)
            if handover is not None:
                stack.callback(handover.close)
            stack.callback(self._checkpoints.close, broken=True, patience=0.0, needless=has_state)
            if left is not None:
                stack.callback(left)
            stack.callback(self._group.abandon)
            stack.callback(self._misuse.unhook)
            stack.callback(self._snapshots.close, _SNAPSHOT_PATIENCE)
            stack.callback(self._reporter.close, "left")
