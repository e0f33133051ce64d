"""The process group and the state of a training in the training API: what is kept, saved and logged."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self

from phalanx.errors import UsageError
from phalanx.train import other_names
from phalanx.train.arguments import check_metrics
from phalanx.train.elastic.halting import Halted
from phalanx.train.elastic.recovery_state import RecoveryState
from phalanx.train.kept.agreement import Agreement
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.reporting.metrics import held
from phalanx.train.reporting.reporter import RunReporter
from phalanx.train.restoration import Restoration
from phalanx.train.schedule.checkpoint_schedule import CheckpointOptions, CheckpointSchedule
from phalanx.train.stepping.stepper import Stepper
from phalanx.worker import ending
from phalanx.worker.process_group.group import WorkerProcessGroup

if TYPE_CHECKING:
    import torch

    from phalanx.train.checkpoint.format.folder import Info


class StatefulRun:
    """The state of a training in a process group. `Run` makes the parts that this uses."""

    _group: WorkerProcessGroup
    _agreement: Agreement
    _counter: TrainingProgress
    _kept: KeptObjects
    _recovery: RecoveryState
    _reporter: RunReporter
    _checkpoints: CheckpointSchedule
    _restoration: Restoration
    _stepper: Stepper

    _resumed: Info | None = None  # the checkpoint from which `keep` has restored

    # -- the process group

    @property
    def group(self) -> WorkerProcessGroup:
        """`run.group.barrier()`: the process group, and all that its ranks do together.

            with run.group.first():                              # one rank per node first
                path = download()
            total = run.group.sum(count)                         # also mean, max, broadcast, gather
            print(run.group.node_rank, run.group.local_rank)     # where this rank is

        See `WorkerProcessGroup`; `phalanx.init()` returns the same.
        """
        return self._group

    @property
    def rank(self) -> int:
        """`run.rank`: the number of this process, from 0 to `world_size - 1`."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """`run.world_size`: the number of ranks."""
        return self._group.world_size

    @property
    def device(self) -> torch.device:
        """`run.device`: where this rank computes: its GPU, or the CPU."""
        return self._group.device

    def print(self, *args: object, **options: Any) -> None:
        """`run.print("text")`: print on rank 0 only, above the progress bar."""
        self._group.print(*args, **options)

    # -- state

    def keep(self, *objects: object, **named: object) -> Info | None:
        """`run.keep(model, opt, data, best=0.0)`: name what must survive, and restore it.

        - `objects`: models, optimizers, schedulers, loaders: all that have state_dict() and load_state_dict()
        - `named`: objects under a name of yours, and plain values: numbers, strings, lists and dicts of them, tensors

        The state is restored from a living rank, a snapshot in memory or the newest checkpoint. Returns the checkpoint,
        if it was that. Give all objects in one call, before or after `run.wrap`; a model and its wrapped module count
        as the same object. Objects without a name are called "model", "optimizer", "scheduler" and "loader". After a
        failure, objects of which each rank has a shard are restored by `run.wrap`, if it comes later.

        A value that is given before the loop is the default for a new training. Read it as `run.state["best"]`; to set
        it in the loop, write `run.state["best"] = accuracy` or `run.keep(best=accuracy)`.
        """
        if not objects and not named:
            raise UsageError("keep() was given nothing to keep", fix="run.keep(model, opt, data)")
        if not self._kept.add(objects, named):
            return self._resumed
        self._agreement.compare_kept(self._group)
        self._resumed = self._restoration.restore(self._group)
        if self._restoration.waits:
            self._stepper.hooks.before_forward.insert(0, self._complete_restore)
            return self._resumed
        self._restoration.conclude(self._group)
        if self._recovery.generation.halt:
            self._checkpoints.find_newest(self._group)
            self._halt()
        return self._resumed

    def _model_wrapped(self) -> None:
        """Give optimizers that were made before the current parameters, and restore what has waited for shards."""
        self._kept.adopt()
        self._recovery.end_wrap()
        if self._restoration.is_due:
            self._complete_restore()

    def _complete_restore(self) -> None:
        """Restore what `keep` has left until models are sharded, if there is something. All ranks call it."""
        if self._restoration.waits:
            self._stepper.hooks.before_forward.remove(self._complete_restore)
            self._restoration.complete()
            self._restoration.conclude(self._group)

    @property
    def state(self) -> MutableMapping[str, Any]:
        """`run.state["best"] = accuracy`: plain values that are kept with the model, and restored with it.

            run.keep(model, opt, data, best=0.0)
            ...
            if accuracy > run.state["best"]:
                run.state["best"] = accuracy

        Numbers, strings, None, tensors up to 1 MB, and lists and dicts of them. Set the same value on every rank, as
        with the model: rank 0 writes checkpoints, and after a failure all ranks get rank 0's values.

        A value that is set for a batch or at the end of an epoch that is repeated after a failure is reset first, so
        that `run.state["count"] += 1` counts once.
        """
        return self._kept.values

    def checkpoints(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: str | int | None = None,
        keep_last: int = 2,
        keep_best: int = 0,
        metric: str = "loss",
        mode: str | None = None,
    ) -> None:
        """`run.checkpoints("FOLDER", every=500)`: save checkpoints. Call it before `run.keep`, which resumes from them.

        - `folder`: where they are saved. Default: `phalanx run --checkpoints`; without it, there are none
        - `every`: 100: steps; "10m": a time. Default: `phalanx run --checkpoint-every`, or 10m
        - `keep_last`: how many of the newest are kept
        - `keep_best`: how many of the best ones by `metric` are kept
        - `metric`: a metric of `run.step`, `run.log` or `run.save`
        - `mode`: "min" or "max"; only a loss has a default: "min"

            run.checkpoints("FOLDER", keep_best=1, metric="accuracy", mode="max")

        If `run.log(accuracy=...)` is called at the end of an epoch, a checkpoint is saved there when it is one of the
        best; in the middle of an epoch, use `run.save(accuracy=...)`.
        """
        if self._kept.objects:
            raise UsageError(
                "checkpoints() was called after keep(), which resumes from them",
                fix="run.checkpoints(…) before run.keep(…)",
            )
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise UsageError(f"folder={folder!r}: expected a path", fix='run.checkpoints("FOLDER", every=500)')
        path = os.fspath(folder) if folder is not None else None
        options = CheckpointOptions(path, every, keep_last, keep_best, metric, mode)
        options.check()
        self._checkpoints.options = options

    def save(self, **metrics: Any) -> bool:
        """`run.save()` or `run.checkpoint()`: save a checkpoint now, in the background. All ranks must call it.

            run.checkpoints("FOLDER", keep_best=1, metric="accuracy", mode="max")
            ...
            run.save(accuracy=accuracy)     # kept if it is the best

        Returns False if it was skipped because earlier ones are still being written. Within a window of micro-batches,
        the state after the last update is saved; a run that resumes from it repeats the window.
        """
        self._complete_restore()
        return self._checkpoints.save(metrics)

    checkpoint = save
    """`run.checkpoint()`: the same as `run.save()`."""

    # -- output

    def log(self, values: Mapping[str, Any] | None = None, /, **metrics: Any) -> None:
        """`run.log(accuracy=accuracy, lr=lr)`: write metrics, at any time and on any rank, without waiting for other
        ranks.

            run.log({"val/accuracy": accuracy})     # a dict takes any name

        They are written to `metrics.jsonl` with the last committed step, TensorBoard, the dashboard, and the trackers
        of `phalanx.main(train, log_to="wandb")`. If ranks log different values, those of other ranks are written with
        their rank. For a metric of every step, use `run.step(opt, loss=loss)`.

        Reading a tensor on a GPU synchronizes with the GPU: on rank 0 at most about 10 times per second, on other ranks
        at every call.
        """
        found = held(check_metrics(values, metrics))
        if found:
            self._reporter.log(found)
            self._checkpoints.logged(found)

    def _halt(self) -> None:
        """End the training when a checkpoint of the last committed step is on disk. Without a folder, continue."""
        if self._checkpoints.checkpoints is not None:
            self._recovery.put_back_buffers()
        saved = self._checkpoints.save_and_wait(self._group)
        if saved is not None:
            self._reporter.finish()
            raise Halted(saved)

    # -- as an object

    if not TYPE_CHECKING:  # a type checker must not assume that every name exists

        def __getattr__(self, name: str) -> Any:
            """Raise an error that says where a name is, if another object has it: most belong to the process group."""
            group = self.__dict__.get("_group")
            if name.startswith("_") or hasattr(type(self), name) or group is None:
                return object.__getattribute__(self, name)  # raises as Python does
            raise AttributeError(f"Run has no {name!r}{other_names.hint(name, group)}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        return [name for name in dir(type(self)) if not name.startswith("_")]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._group.close(failed=ending.is_failure(error))

    def __repr__(self) -> str:
        group = self._group
        return f"<{type(self).__name__} rank {group.rank} of {group.world_size} on {group.device}, by {group.launcher}>"
