"""When a run saves checkpoints, and which one it resumes from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError, UsageError
from phalanx.train.interval import Interval
from phalanx.train.kept import KeptObjects, TrainingProgress
from phalanx.train.reporting.metrics import held, read

if TYPE_CHECKING:  # importing them takes most of a second: only for a run that has a folder for checkpoints
    import torch

    from phalanx.train.checkpoint.checkpoints import Checkpoints
    from phalanx.train.checkpoint.format.folder import Info
    from phalanx.worker.process_group.group import WorkerProcessGroup

EVERY = "10m"


class CheckpointSchedule:
    """The checkpoints of one run. Without a folder there are none, and most calls do nothing."""

    def __init__(self, kept: KeptObjects, counter: TrainingProgress, flush: Callable[[], None]) -> None:
        self.checkpoints: Checkpoints | None = None
        self._kept = kept
        self._counter = counter
        self._flush = flush  # writes the metrics so far
        self._due = Interval(None)
        self._saved = 0  # the step of the newest checkpoint
        self._latest: dict[str, Any] = {}  # metrics of the newest step

    def open(
        self,
        group: WorkerProcessGroup,
        folder: str | os.PathLike[str],
        every: str | int,
        *,
        waited: float,
        generator: torch.Generator,
        retention: Mapping[str, Any],
    ) -> None:
        """Save checkpoints in `folder` from now on. `waited`: seconds since one was due, before this group formed."""
        from phalanx.train.checkpoint import state
        from phalanx.train.checkpoint.checkpoints import Checkpoints

        self._due = Interval(every, waited=waited)
        self.checkpoints = Checkpoints(folder, group, generators=[generator], **retention)
        state.taken(self._kept.everything())  # raises now if something cannot be saved, not after hundreds of steps
        self.checkpoints.open()

    @property
    def folder(self) -> str | None:
        """Where checkpoints are saved."""
        return self.checkpoints.folder if self.checkpoints is not None else None

    def load(self) -> Info | None:
        """Load the newest checkpoint into the kept objects, if there is one."""
        assert self.checkpoints is not None  # noqa: S101
        info = self.checkpoints.load(self._kept.everything())
        if info is not None:
            self._saved = info.step
        return info

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint on the disk; -1: there is none."""
        return self.checkpoints.latest_step() if self.checkpoints is not None else -1

    def find_newest(self, group: WorkerProcessGroup) -> None:
        """Make all ranks agree on which step was saved last, by what rank 0 finds on the disk."""
        self._saved = group.broadcast(max(self.newest_step(), 0) if group.is_main else 0)

    def waited(self, before: float) -> float:
        """Seconds since a checkpoint was due; `before` as long as nothing is restored.

        The next group starts with it: if each started at zero, frequent failures would prevent checkpoints.
        """
        return self._due.waited if self._kept.ready else before

    def committed(self, group: WorkerProcessGroup, values: dict[str, Any]) -> None:
        """Save after a committed step, if a checkpoint is due."""
        if self.checkpoints is not None:
            self._latest = values
            if self._due.passed(self._counter.steps, group):
                self.save(values)

    def save(self, metrics: Mapping[str, Any]) -> bool:
        """Save now. Return False if it was skipped because earlier checkpoints are still being written."""
        if self.checkpoints is None:
            raise UsageError(
                "there is no folder for checkpoints", fix='run.keep(folder="checkpoints", model=model, opt=opt)'
            )
        self._flush()  # a run that resumes from here has all metrics up to here
        (numbers,) = read([held(metrics)])
        step = self._counter.steps
        saved = self.checkpoints.save(step, self._kept.everything(), {"epoch": self._counter.epoch}, numbers)
        if saved:
            self._saved = step
        return saved

    def finish(self) -> None:
        """Save the last step, if it is not saved yet."""
        if self.checkpoints is not None and self._counter.steps > self._saved:
            self.checkpoints.wait()
            self.save(self._latest)

    def save_and_wait(self) -> bool:
        """Return when a checkpoint of the last step is on the disk; False: there is no folder for it."""
        if self.checkpoints is None:
            return False
        if self._counter.steps != self._saved:
            with contextlib.suppress(CheckpointError):  # an earlier save failed; this one makes up for it
                self.checkpoints.wait()
            self.save(self._latest)
        self.checkpoints.wait()
        return True

    def close(self, **options: Any) -> None:
        """Close the checkpoints, if there are any. The options are those of `Checkpoints.close`."""
        if self.checkpoints is not None:
            self.checkpoints.close(**options)
