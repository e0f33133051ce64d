"""Decides when a run saves checkpoints, and which one it resumes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError, OptionError, UsageError
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.reporting.metrics import held, read
from phalanx.train.schedule.interval import Interval

if TYPE_CHECKING:  # importing them takes most of a second: only for a run with a folder for checkpoints
    from phalanx.train.checkpoint.checkpoints import Checkpoints
    from phalanx.train.checkpoint.format.folder import Info
    from phalanx.worker.process_group.group import WorkerProcessGroup

EVERY = "10m"


@dataclass(frozen=True)
class CheckpointOptions:
    """The arguments of `run.checkpoints`. None: the option of `phalanx run` applies."""

    folder: str | None = None
    every: str | int | None = None
    keep_last: int = 2
    keep_best: int = 0
    metric: str = "loss"
    mode: str | None = None  # None: "min", if the metric is a loss

    def check(self) -> None:
        """Raise if an option cannot be used, before anything depends on it."""
        from phalanx.train.checkpoint.retention import Retention

        Interval(self.every)
        for name, value in (("keep_last", self.keep_last), ("keep_best", self.keep_best)):
            if type(value) is not int:
                raise OptionError(f"{name}={value!r}: expected how many checkpoints to keep", fix=f"{name}=2")
        if not isinstance(self.metric, str):
            raise OptionError(f"metric={self.metric!r}: expected the name of a metric", fix='metric="accuracy"')
        if self.mode is None and self.keep_best and "loss" not in self.metric.lower():
            raise OptionError(
                f'keep_best={self.keep_best}, metric="{self.metric}": is the highest value the best, or the lowest?',
                fix='mode="max", or mode="min"',
            )
        Retention(self.keep_last, self.keep_best, self.metric, self.mode or "min")


class CheckpointSchedule:
    """The checkpoints of one run. Without a folder there are none, and most calls do nothing."""

    def __init__(self, kept: KeptObjects, counter: TrainingProgress, flush: Callable[[], None]) -> None:
        self.checkpoints: Checkpoints | None = None
        self._kept = kept
        self._counter = counter
        self._flush = flush  # writes the metrics so far
        self._due = Interval(None)
        self._saved = 0  # the step of the newest checkpoint
        self._saved_values: dict[str, Any] = {}  # and the kept values in it
        self._latest: dict[str, Any] = {}  # metrics of the newest step
        # values logged since the newest step, if the best checkpoints are chosen by them
        self._scored: dict[str, Any] = {}
        self._request: tuple[Mapping[str, Any], int | None] = ({}, None)  # of the newest save
        self._unsaved: CheckpointError | None = None  # why the last step of a complete training is not saved
        self.options = CheckpointOptions()

    def open(
        self,
        group: WorkerProcessGroup,
        folder: str,
        every: str | int,
        *,
        waited: float,
        key: bytes = b"",
        begins: bool = True,
    ) -> None:
        """Save checkpoints in `folder` from now on.

        waited  seconds since one was due, before this group formed
        begins  the run starts: a folder that is not writable is an error. Later it does not end the training
        """
        options = self.options
        from phalanx.train.checkpoint import state
        from phalanx.train.checkpoint.checkpoints import Checkpoints

        self._due = Interval(every, waited=waited)
        self.checkpoints = Checkpoints(
            folder,
            group,
            keep_last=options.keep_last,
            keep_best=options.keep_best,
            best=options.metric,
            mode=options.mode or "min",
            generators=[group.generator],
            key=key,
            required=begins,
        )
        state.taken(self._kept.everything())  # raises now if something cannot be saved, not after hundreds of steps
        self.checkpoints.ready()

    @property
    def folder(self) -> str | None:
        """Where checkpoints are saved."""
        return self.checkpoints.folder if self.checkpoints is not None else None

    def load(self) -> Info | None:
        """Load the newest checkpoint into the kept objects, if there is one."""
        assert self.checkpoints is not None  # noqa: S101
        info = self.checkpoints.load(self._kept.everything())
        if info is not None:
            self._saved, self._saved_values = info.step, self._kept.values.state_dict()
        return info

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint on the disk; -1: there is none."""
        return self.checkpoints.latest_step() if self.checkpoints is not None else -1

    def find_newest(self, group: WorkerProcessGroup) -> None:
        """Make all ranks agree on the step that was saved last, according to the disk of rank 0."""
        self._saved = group.broadcast(max(self.newest_step(), 0) if group.is_main else 0)

    def waited(self, before: float) -> float:
        """Seconds since a checkpoint was due; `before` until something is restored.

        The next group starts with it: if each started at zero, frequent failures would prevent checkpoints.
        """
        return self._due.waited if self._kept.ready else before

    def committed(self, group: WorkerProcessGroup, values: dict[str, Any]) -> None:
        """Save after a committed step, if a checkpoint is due."""
        if self.checkpoints is not None:
            self._latest, self._scored = values, {}
            if self._due.passed(self._counter.steps, group):
                self.save(values)

    def save(self, metrics: Mapping[str, Any], epoch: int | None = None) -> bool:
        """Save now. Return False if it was skipped because earlier checkpoints are still being written.

        `epoch`: the one to resume with. Default: the current one.
        """
        if self.checkpoints is None:
            raise UsageError("there is no folder for checkpoints", fix='run.checkpoints("FOLDER") before run.keep(…)')
        self._flush()  # a run that resumes from here has all metrics up to here
        (numbers,) = read([held(metrics)])
        step = self._counter.steps
        extra = {"epoch": self._counter.epoch if epoch is None else epoch}
        self._request = (metrics, epoch)
        saved = self.checkpoints.save(step, self._kept.everything(), extra, numbers)
        if saved:
            self._saved, self._saved_values = step, self._kept.values.state_dict()
        return saved

    def logged(self, values: Mapping[str, Any]) -> None:
        """Store logged values, if the best checkpoints are chosen by them: they describe the current model."""
        if self.checkpoints is not None and self.checkpoints.best_metric in values:
            self._scored.update(values)

    def epoch_ended(self, group: WorkerProcessGroup, epoch: int) -> None:
        """Save if rank 0 has logged a metric since the last step that makes this one of the best checkpoints.

        All ranks call it, and have not changed the model since. A run that resumes from it begins with the next epoch.
        """
        checkpoints = self.checkpoints
        if checkpoints is None or checkpoints.best_metric is None:
            return
        (scored,) = read([self._scored])
        self._scored = {}
        best = group.is_main and bool(scored) and checkpoints.is_best(scored[checkpoints.best_metric])
        if found := group.broadcast(scored if best else {}):
            self.save({**self._latest, **found}, epoch + 1)

    def finish(self, group: WorkerProcessGroup) -> bool:
        """Save the last step, if it is not saved yet, and wait until it is on disk. Return whether it is.

        A failed write does not make the training incomplete: `close` raises the error, and nothing is computed again.
        """
        self.epoch_ended(group, self._counter.epoch - 1)
        if self.checkpoints is None:
            return True
        request: tuple[Mapping[str, Any], int | None] | None = None
        if self._counter.steps > self._saved or group.broadcast(self._kept.values.state_dict() != self._saved_values):
            self.checkpoints.finish_all()
            request = (self._latest, None)
        self._unsaved = self._write_last(request)
        if self._unsaved is not None and self.checkpoints.make_room():
            self._unsaved = self._write_last(self._request)
        if self._unsaved is not None:
            newest = group.broadcast(self.newest_step() if group.is_main else -1)
            self._unsaved = unsaved(self._unsaved, self._counter.steps, newest)
        return self._unsaved is None

    def _write_last(self, request: tuple[Mapping[str, Any], int | None] | None) -> CheckpointError | None:
        """Save, if there is something to save, and wait. Return the error of the newest save."""
        assert self.checkpoints is not None  # noqa: S101
        try:
            if request is not None and not self.save(*request):
                return self.checkpoints.refused
            self.checkpoints.wait()
        except CheckpointError as error:
            return error
        return None

    def save_and_wait(self, group: WorkerProcessGroup) -> int | None:
        """Wait until a checkpoint of the last step is on disk, and return its step. None: there is no folder.

        If it cannot be written, report that and return the step of the newest one. Raises if there is none.
        """
        if self.checkpoints is None:
            return None
        request: tuple[Mapping[str, Any], int | None] | None = None
        if self._counter.steps != self._saved:
            self.checkpoints.finish_all()
            request = (self._latest, None)
        error = self._write_last(request)
        if error is not None and self.checkpoints.make_room():
            error = self._write_last(self._request)
        if error is None:
            return self._counter.steps
        newest: int = group.broadcast(self.newest_step() if group.is_main else -1)
        if newest < 0:
            raise error
        group.print(f"phalanx: {error.what}: {'; '.join(error.details)}")
        return newest

    def close(self, **options: Any) -> None:
        """Close the checkpoints, if there are any. The options are those of `Checkpoints.close`."""
        if self.checkpoints is not None:
            self.checkpoints.close(**options)
        if self._unsaved is not None and not options.get("broken"):
            error, self._unsaved = self._unsaved, None
            raise error


def unsaved(error: CheckpointError, step: int, newest: int) -> CheckpointError:
    """Return the error of a complete training whose last step is not saved."""
    found = f"the newest checkpoint is that of step {newest}" if newest >= 0 else "there is no checkpoint"
    repeats = f"the same command then repeats the steps after {max(newest, 0)}" if newest < step else ""
    return CheckpointError(
        f"the training is complete, but its last checkpoint was not written (step {step})",
        details=[*(error.details or (error.what,)), found],
        fix="; ".join(filter(None, ["make that folder writable, with free space", repeats])),
    )
