"""Decides when a run takes snapshots in memory, and whether it resumes from one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import MEMORY, OFF, RUN, SNAPSHOT_EVERY
from phalanx.errors import LaunchError
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.schedule.interval import Interval
from phalanx.train.stepping.stepper import Stepper

if TYPE_CHECKING:  # importing them takes most of a second: only for a run that takes snapshots
    from phalanx.train.schedule.checkpoint_schedule import CheckpointSchedule
    from phalanx.train.snapshot.cadence import Cadence
    from phalanx.train.snapshot.found import FoundSnapshot
    from phalanx.train.snapshot.snapshots import Snapshots
    from phalanx.worker.process_group.group import WorkerProcessGroup

EVERY = "30s"  # the copy of a state of 1 GB takes a tenth of a second


class SnapshotSchedule:
    """The snapshots of one run. Without an agent that holds memory for them, calls do nothing."""

    def __init__(self, kept: KeptObjects, counter: TrainingProgress, stepper: Stepper) -> None:
        self.snapshots: Snapshots | None = None
        self.layouts: list[list[list[int]]] = []  # of DDP's buckets, from the second step on
        self._kept = kept
        self._counter = counter
        self._stepper = stepper
        self._due: Interval | Cadence = Interval(None)
        self._chosen: str | None = None  # the interval that the user requested
        self._training = 0

    @property
    def active(self) -> bool:
        """Whether snapshots are taken."""
        return self.snapshots is not None

    def open(self, group: WorkerProcessGroup, waited: float, *, training: int, regroups: bool) -> float:
        """Take snapshots from now on, if the agents of all ranks hold memory for them and would restart the run.

        `waited`: seconds since a checkpoint was due; returns the maximum of all ranks. `training`: its number in this
        process. `regroups`: a rank that dies is replaced.
        """
        environ = environment()
        if RUN not in environ:
            return waited
        self._training = training
        every = environ.get(SNAPSHOT_EVERY)
        snapshots = self._connect(group, environ, regroups)
        due_for = snapshots.waited() if snapshots is not None else 0.0
        # Nodes may have different options, and a new rank does not know how long checkpoints have waited.
        mine = [snapshots is not None, every, due_for, waited, environ.get(MEMORY, "")]
        offers: list[Any] = group.gather(mine, all=True) or []
        if snapshots is not None and not all(offer[0] for offer in offers):
            snapshots.close()
            snapshots = None
        if snapshots is not None:
            snapshots.held_in([offer[4] for offer in offers])
            self._chosen = offers[0][1]
            self._due = Interval(self._chosen or EVERY, waited=max(offer[2] for offer in offers))
            self._stepper.hooks.before_forward.append(snapshots.forward)
            self._stepper.hooks.before_update.append(snapshots.update)
        self.snapshots = snapshots
        return max(float(offer[3]) for offer in offers)

    def _connect(self, group: WorkerProcessGroup, environ: Mapping[str, str], regroups: bool) -> Snapshots | None:
        every = environ.get(SNAPSHOT_EVERY)
        restarts = regroups or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if not environ.get(MEMORY) or every in OFF or not (every or restarts):
            return None
        from phalanx.train.snapshot.snapshots import Snapshots
        from phalanx.worker.snapshot_memory import SnapshotMemoryClient

        with contextlib.suppress(LaunchError):
            memory = SnapshotMemoryClient(environ[MEMORY], str(self._training))
            return Snapshots(group, memory, generators=[group.generator])
        return None

    def reached(self, group: WorkerProcessGroup, step: int) -> int:
        """Return the newest step that a rank has committed: `step` on this rank, or later as its snapshots know."""
        if self.snapshots is None:
            return step
        return max(group.gather(max(step, self.snapshots.reached()), all=True) or [0])

    def newest(self, group: WorkerProcessGroup, checkpoints: CheckpointSchedule) -> FoundSnapshot | None:
        """Return the newest snapshot. None: there is none, or a checkpoint on disk is newer."""
        if self.snapshots is None:
            return None
        found = self.snapshots.newest()
        on_disk = group.broadcast(checkpoints.newest_step() if group.is_main else -1)
        return None if found is None or found.step < on_disk else found

    def load(self, found: FoundSnapshot, kept: Mapping[str, object]) -> dict[str, Any] | None:
        """Load a snapshot into these objects. Return the values saved with it. None: it could not be read."""
        assert self.snapshots is not None  # noqa: S101
        extra = self.snapshots.load(found, kept)
        if extra is not None:
            self.snapshots.committed(found.step)
        return extra

    def committed(self, group: WorkerProcessGroup) -> None:
        """Take a snapshot after a committed step, if one is due."""
        if self.snapshots is None:
            return
        step = self._counter.steps
        self.snapshots.committed(step)
        if step == self._counter.start + 1:
            self.layouts = self._stepper.layouts
            self._adapt()
        elif isinstance(self._due, Interval) and self._stepper.several:  # some trainings begin with one optimizer
            self._adapt()
        if self._due.passed(step, group) or self.snapshots.wanted(step):
            extra = {"epoch": self._counter.epoch, "layouts": self.layouts}
            self.snapshots.save(step, self._kept.everything(), extra)

    def _adapt(self) -> None:
        """Take snapshots as often as is cheap, if each shard exists only once, or if a rank that is lost between the
        updates of a step leaves no rank with a committed step.
        """
        if self.snapshots is None or self._chosen is not None:
            return
        from phalanx.train.model import shard_placement
        from phalanx.train.snapshot.cadence import Cadence

        kept = self._kept.objects
        sharded = shard_placement.is_sharded(kept) and not shard_placement.is_replicated(kept)
        if sharded or self._stepper.several:
            of = "the sharded state" if sharded else "a state with several updates per step"
            self._due = Cadence(self.snapshots, self.snapshots.say, training=self._training, of=of)

    def close(self, patience: float = 0.0) -> None:
        """Close the snapshots, if there are any. `patience`: seconds to wait for one that is nearly complete."""
        if self.snapshots is not None:
            self.snapshots.close(patience)
