"""What a run knows about earlier groups, and what it can offer to the next one.

The elastic loop creates a `Generation` for every group that forms, and from it a `RecoveryState` for the run. A run
outside of the loop also has one, which says that there was no earlier group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.model.wrap import SHARDED
from phalanx.train.settings import OptimizerSettings

if TYPE_CHECKING:
    from phalanx.contract.messages.worker_messages import MeasuredStep
    from phalanx.train.data.loader import Loader
    from phalanx.train.elastic.committed_buffers import CommittedBuffers
    from phalanx.train.elastic.handover import Handover
    from phalanx.train.elastic.made_once import MadeOnce
    from phalanx.train.elastic.state_offer import StateOffer
    from phalanx.train.elastic.two_phase import TwoPhaseCommit
    from phalanx.train.schedule.checkpoint_schedule import CheckpointSchedule
    from phalanx.train.stepping.stepper import Stepper
    from phalanx.worker.rendezvous.membership import Membership

trainings = itertools.count()  # of this process
Layouts = list[list[list[int]]]


@dataclass(frozen=True)
class AgentHooks:
    """What the elastic loop needs to know about a run."""

    # the committed step, and the newest step before the group was lost
    first_step: Callable[[int, int], None] | None = None
    checkpoint_folder: Callable[[str], None] | None = None
    should_halt: Callable[[int], bool] | None = None  # asked between steps
    measured: Callable[[MeasuredStep], None] | None = None  # at intervals, on rank 0
    batch_skipped: Callable[[int, str, float], None] | None = None  # on rank 0: step, what was not finite, seconds lost
    check_group: Callable[[], None] | None = None  # raises if the group was lost, so that gradients may be incomplete


@dataclass(frozen=True)
class Generation:
    """One formation of the process group, as described by the elastic loop for the run."""

    number: int = 0
    training: int = field(default_factory=lambda: next(trainings))  # number of the training in this process
    once: MadeOnce | None = None  # for `run.once`, in a process that can regroup
    handover: Handover | None = None
    waited: float = 0.0  # seconds since a checkpoint was due, in the previous group
    halt: bool = False  # end as soon as the state is restored and saved
    hooks: AgentHooks = AgentHooks()

    @property
    def regroups(self) -> bool:
        """Whether a rank that dies is replaced while the others keep their processes."""
        return self.once is not None


class SnapshotSource(Protocol):
    """The snapshots of a run, as far as recovery needs them."""

    layouts: Layouts  # of DDP's buckets

    @property
    def active(self) -> bool:
        """Whether snapshots are taken."""
        ...


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that recovery uses."""

    membership: Membership
    kept: KeptObjects
    counter: TrainingProgress
    stepper: Stepper
    checkpoints: CheckpointSchedule
    snapshots: SnapshotSource


class RecoveryState:
    """The source of a run's state, and what this rank could hand over."""

    def __init__(self, generation: Generation | None = None, offer: StateOffer | None = None) -> None:
        self.generation = generation if generation is not None else Generation()
        # What this process had when the last group was lost, until the state is restored. Drop it afterwards: each run
        # would hold all earlier runs through it.
        self.offer = offer
        self.waited = self.generation.waited
        self.before = 0  # the newest step committed before the last group was lost
        self.from_peers = False  # the state was handed over by live ranks
        self.from_snapshot = False  # the state comes from a snapshot in memory
        self.models = EqualModels()
        self._report = self.generation.hooks.first_step
        self._two_phase: TwoPhaseCommit | None = None
        self._buffers: CommittedBuffers | None = None
        self._sharding = False  # a part of a model, or of its optimizer, is sharded
        self._epoch_end: tuple[int, Loader, Any, OptimizerSettings] | None = None  # steps, data, its position

    def attach(self, parts: RunParts) -> None:
        """Connect this with the parts of the run."""
        self._parts = parts
        check = self.generation.hooks.check_group
        # On other devices an aborted operation raises by itself.
        if check is not None and parts.membership.device.type == "cuda":
            parts.stepper.hooks.before_update.append(check)
        if check is not None:
            from phalanx.train.elastic.committed_buffers import CommittedBuffers

            self._buffers = CommittedBuffers(parts.kept, parts.counter, parts.stepper)

    def commit_in_two_phases(self, loaders: Callable[[], list[Loader]]) -> None:
        """Make all ranks confirm an update before any rank makes it, if a lost rank can be replaced."""
        check = self.generation.hooks.check_group
        if check is not None and self._two_phase is None and self._parts.membership.placement.world_size > 1:
            from phalanx.train.elastic.two_phase import TwoPhaseCommit

            self._two_phase = TwoPhaseCommit(
                self._parts.membership.device,
                check,
                stepper=self._parts.stepper,
                counter=self._parts.counter,
                values=self._parts.kept.values,
                loaders=loaders,
            )

    def release(self) -> None:
        """Release the parts of the run, which would keep its connections until the garbage collector runs."""
        if self._two_phase is not None:
            self._two_phase.close()
        if self._buffers is not None:
            self._buffers.close()
        self._two_phase = self._buffers = None
        self._parts.stepper.hooks.before_update.clear()

    def sharded_at_peers(self) -> Sequence[str]:
        """Return the names of the objects of which live ranks have all shards."""
        handover = self.generation.handover
        return handover.sharded() if handover is not None else ()

    def take_over(self, kept: Mapping[str, object], *, more: bool = False) -> None:
        """Restore these objects from a live rank, if there is one: its state is newer than any on disk.

        `more`: it is called again for the sharded ones.
        """
        self.before = self.offer.step if self.offer is not None else 0
        handover = self.generation.handover
        received = handover.complete(kept, more=more) if handover is not None else None
        if received is not None:
            self.from_peers = True
            self._parts.counter.steps, self._parts.counter.epoch = received.step, received.epoch
            self.models.layouts = received.layouts

    def reference(self) -> int | None:
        """Return a rank that was part of the training before this group formed. None: this is the first group."""
        handover, number = self.generation.handover, self.generation.number
        holder = handover.holder if handover is not None else None
        return 0 if holder is None and number else holder

    def restored(self) -> None:
        """Record that the kept objects have the state of a committed step from now on."""
        self._parts.kept.ready, self.offer, self._parts.counter.start = True, None, self._parts.counter.steps

    def begin_wrap(self, model: Any, how: str) -> list[list[int]] | None:
        """Return the bucket layout for a model that is the same on all ranks, [] if unknown; None: it may differ.

        Until `end_wrap`, a model that is being sharded belongs to no committed step.
        """
        self._sharding = how in SHARDED
        handover = self.generation.handover
        if how == "ddp" and handover is not None and handover.awaited and not self._parts.kept.ready:
            self.models.postpone(model)  # rank 0 may be new, and another rank may have the state to resume from
            return []
        if not (self.from_peers or self.from_snapshot) or not self._parts.kept.has_model(model):
            return None
        return self.models.next_layout()

    def end_wrap(self) -> None:
        """Record that the model is wrapped, and that optimizers have its parameters."""
        self._sharding = False

    def epoch_ended(self, data: Loader) -> None:
        """Record the settings at the end of an epoch: after a failure the script repeats what it does there."""
        if self.generation.regroups:
            settings = OptimizerSettings(self._parts.kept.objects)
            self._epoch_end = self._parts.counter.steps, data, data.position, settings

    def put_back_buffers(self) -> None:
        """Undo what forwards have changed since the last committed step: the training ends with that one."""
        if self._buffers is not None:
            self._buffers.put_back()

    def first_step_committed(self) -> None:
        """Report the first step of this generation to the elastic loop, once."""
        if self._report is not None:
            self._report(self._parts.counter.steps, self.before)
            self._report = None

    # -- what the elastic loop asks

    @property
    def counter(self) -> TrainingProgress:
        """The progress of the training."""
        return self._parts.counter

    @property
    def torn(self) -> bool:
        """Whether an update has begun and its step is not committed: then the kept objects belong to no step."""
        return self._parts.stepper.torn

    @property
    def has_snapshots(self) -> bool:
        """Whether the next group can find snapshots in memory."""
        return self._parts.snapshots.active

    @property
    def checkpoint_waited(self) -> float:
        """Seconds since a checkpoint was due, for the next group."""
        return self._parts.checkpoints.waited(self.waited)

    def current_offer(self, *, asleep: bool = False) -> StateOffer | None:
        """Return what this rank has, as of its last committed step. None: nothing from which training could resume.

        `asleep`: the main thread is in the middle of the next step, so its parameters and gradients are not touched.
        """
        from phalanx.train.elastic.state_offer import StateOffer

        kept, counter, handover = self._parts.kept, self._parts.counter, self.generation.handover
        if not kept.ready or self._sharding:
            return None if handover is not None and handover.spoilt else self.offer
        if self._epoch_end is not None:
            steps, data, position, settings = self._epoch_end
            if (steps, position) == (counter.steps, data.position):
                settings.put_back()
        pending = self._two_phase.pending if self._two_phase is not None else None
        if not asleep:
            kept.drop_unfinished_step(gradients=pending is None)
        if self._buffers is not None and pending is None:
            self._buffers.put_back()
        # DDP changes its buckets after the first step, but not if that was never committed.
        layouts = self.models.layouts
        if counter.steps > counter.start:
            layouts = self._parts.snapshots.layouts if asleep else self._parts.stepper.layouts
        return StateOffer(
            counter.steps,
            counter.epoch,
            kept.committed(),
            layouts,
            self._parts.membership.placement.rank,
            self._parts.membership.placement.world_size,
            OptimizerSettings(kept.objects),
            pending,
            self._buffers if pending is not None else None,
        )


class EqualModels:
    """Models that are the same on all ranks when they are wrapped, so that DDP need not broadcast them."""

    def __init__(self) -> None:
        self.layouts: Layouts = []  # of the buckets of models that were wrapped in the group before
        self._wrapped = 0
        self._unequal: list[Any] = []  # wrapped before the restore of the state that they may be part of

    def next_layout(self) -> list[list[int]]:
        """Return the bucket layout for the next model; [] if it is unknown."""
        self._wrapped += 1
        return self.layouts[self._wrapped - 1] if self._wrapped <= len(self.layouts) else []

    def postpone(self, model: Any) -> None:
        """Broadcast this model in `make_equal`, unless it is among the restored objects then."""
        self._unequal.append(model)

    def make_equal(self, kept: KeptObjects, world_size: int) -> None:
        """Broadcast models that are wrapped and not kept from rank 0, as DDP would have done."""
        import torch.distributed as dist

        restored = {id(getattr(thing, "module", thing)) for thing in kept.objects.values()}
        for model in self._unequal if world_size > 1 else ():
            for tensor in (*model.parameters(), *model.buffers()) if id(model) not in restored else ():
                dist.broadcast(tensor.detach(), 0)
        self._unequal = []
