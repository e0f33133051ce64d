"""Restores the kept objects of a run: from a live rank, a snapshot in memory, or a checkpoint on disk.

Objects of which each rank had a shard wait until their models are sharded again, if `run.keep` comes before `run.wrap`:
otherwise each rank would receive all shards, and need memory for them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.checkpoint_key import read_key
from phalanx.contract.variables import CHECKPOINT_EVERY, CHECKPOINT_KEY, CHECKPOINTS
from phalanx.errors import CheckpointError
from phalanx.train.batch_reader import BatchReader
from phalanx.train.elastic.recovery_state import RecoveryState, RunParts
from phalanx.train.schedule import checkpoint_schedule
from phalanx.train.schedule.checkpoint_schedule import CheckpointOptions
from phalanx.train.script_warnings import ScriptWarnings
from phalanx.worker.process_group.group import WorkerProcessGroup

if TYPE_CHECKING:
    from phalanx.train.checkpoint.format.folder import Info
    from phalanx.train.schedule.snapshot_schedule import SnapshotSchedule
    from phalanx.train.snapshot.found import FoundSnapshot

logger = logging.getLogger(__name__)


class Restoration:
    """Finds the newest state and restores it, once per run. It also opens checkpoints and snapshots."""

    def __init__(
        self,
        parts: RunParts,
        snapshots: SnapshotSchedule,
        recovery: RecoveryState,
        reader: BatchReader,
        warnings: ScriptWarnings,
    ) -> None:
        self._parts = parts
        self._snapshots = snapshots
        self._recovery = recovery
        self._reader = reader
        self._warnings = warnings
        self._later: Mapping[str, object] = {}  # objects that wait until their models are sharded
        self._found: FoundSnapshot | None = None  # where they are; None: at live ranks

    @property
    def waits(self) -> bool:
        """Whether some objects are not restored yet: call `complete`."""
        return bool(self._later)

    @property
    def is_due(self) -> bool:
        """Whether the models that objects wait for are sharded now."""
        return self.waits and self._parts.kept.are_wrapped(self._later)

    def restore(self, group: WorkerProcessGroup) -> Info | None:
        """Restore from the newest state. Return the checkpoint, if it was one."""
        recovery, counter = self._recovery, self._parts.counter
        checkpoints, snapshots = self._parts.checkpoints, self._snapshots
        environ = environment()
        options = checkpoints.options
        folder, every = options.folder or environ.get(CHECKPOINTS), options.every
        now, later = self._divided(recovery.sharded_at_peers())
        recovery.take_over(now, more=bool(later))
        generation = recovery.generation
        recovery.waited = snapshots.open(
            group, recovery.waited, training=generation.training, regroups=generation.regroups
        )
        begins = not generation.number and environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"  # the very first start
        if folder is not None:
            if every is None:
                every = environ.get(CHECKPOINT_EVERY, checkpoint_schedule.EVERY)
            key = read_key(environ[CHECKPOINT_KEY]) if CHECKPOINT_KEY in environ else b""
            checkpoints.open(group, folder, every, waited=recovery.waited, key=key, begins=begins)
        elif options != CheckpointOptions() and group.is_main:
            self._warnings.warn(
                "folder",
                "there is no folder for checkpoints, so none are saved: "
                'run.checkpoints("FOLDER", …), or phalanx run --checkpoints DIR',
            )
        if recovery.from_peers:
            logger.debug("restored from another rank at step %d", counter.steps)
            self._make_values_equal(group)
            self._later = later
            return None
        if not begins:
            recovery.before = snapshots.reached(group, recovery.before)
        found = snapshots.newest(group, checkpoints) if not begins else None
        if found is not None:
            now, later = self._divided(found.sharded)
            if self._load_snapshot(found, now):
                self._later, self._found = later, found
                group.print(f"resumed from a snapshot in memory at step {counter.steps}, epoch {counter.epoch}")
                return None
        info = checkpoints.load() if folder is not None else None
        if info is not None:
            logger.debug("restored from a checkpoint at step %d", info.step)
            self._continue_at(info.step, info.extra.get("epoch"))
            group.print(f"resumed at step {counter.steps}, epoch {counter.epoch}")
        return info

    def complete(self) -> None:
        """Restore the objects that have waited, whether their models are sharded or not."""
        later, self._later = self._later, {}
        found, self._found = self._found, None
        if found is None:
            self._recovery.take_over(later)
        elif not self._load_snapshot(found, later):  # other objects are already restored from it
            raise CheckpointError(f"the snapshot of step {found.step} could not be read again")

    def conclude(self, group: WorkerProcessGroup) -> None:
        """Make the other models equal on all ranks, call the hook if the number of ranks has changed, and report where
        checkpoints are saved."""
        self._recovery.models.make_equal(self._parts.kept, group.world_size)
        group.resizing.settle(self._parts.stepper.ranks_before)
        self._recovery.restored()
        folder, report = self._parts.checkpoints.folder, self._recovery.generation.hooks.checkpoint_folder
        if folder is not None and report is not None:
            report(folder)

    def _divided(self, sharded: Collection[str]) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """Divide the kept objects: those to restore now, and those that wait. `sharded`: of which ranks had shards."""
        kept = self._parts.kept
        if self._recovery.generation.halt or kept.are_wrapped(sharded):
            return kept.everything(), {}
        waiting = {id(kept.objects[name]) for name in sharded if name in kept.objects}
        # A scheduler waits for its optimizer.
        both = {name: (thing, getattr(thing, "optimizer", None)) for name, thing in kept.objects.items()}
        later = {name: things[0] for name, things in both.items() if not waiting.isdisjoint(map(id, things))}
        return {name: thing for name, thing in kept.everything().items() if name not in later}, later

    def _load_snapshot(self, found: FoundSnapshot, kept: Mapping[str, object]) -> bool:
        """Restore these objects from a snapshot. Return False if it could not be read."""
        recovery = self._recovery
        extra = self._snapshots.load(found, kept)
        if extra is None:
            return False
        recovery.from_snapshot = True
        self._continue_at(found.step, extra.get("epoch"))
        logger.debug("restored %s from a snapshot at step %d", ", ".join(kept), found.step)
        recovery.models.layouts = extra.get("layouts", [])
        return True

    def _make_values_equal(self, group: WorkerProcessGroup) -> None:
        """Give all ranks the values of rank 0. A script may have set them on some ranks only."""
        from phalanx.train.checkpoint.format.plain import packed, unpacked

        values = self._parts.kept.values
        values.replace(unpacked(group.broadcast(packed(values.state_dict(), "run.state", {})), {}))

    def _continue_at(self, step: int, epoch: object) -> None:
        self._parts.counter.steps, self._parts.counter.epoch = step, epoch if isinstance(epoch, int) else 0
        self._reader.remember_rng()
