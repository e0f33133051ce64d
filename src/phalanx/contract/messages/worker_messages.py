"""The messages between a worker that can regroup and its agent, one per packet.

A plain script never connects. `phalanx.main` connects at its start and receives its assignment. Later it is notified
when a worker has failed and the group forms again.
"""

from __future__ import annotations

import msgspec

from phalanx.contract.encoding import Decoder
from phalanx.contract.ranks.placement import RankPlacement


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker connects. The kernel identifies the process."""

    cuda: int = -1  # the CUDA device that it is going to use; -1: none
    variables: dict[str, str] = {}  # environment variables that CUDA reads
    outlives: bool = False  # the end of the fork server does not end it


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The worker is alive; `step` is the number of steps that it has committed."""

    step: int
    samples: int = -1  # training samples of this rank in this generation; -1: unknown
    blocked: bool = False  # its group is lost, and its GPU does not let it leave


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True, tag="measured-step"):
    """Metrics of the newest committed step, from rank 0, a few times per second at most."""

    step: int
    epoch: int = 0  # counted from 1; 0: unknown
    epochs: int = 0  # 0: unknown
    total: int = 0  # planned steps; 0: unknown
    values: dict[str, float | None] = {}  # None: not finite
    received: float = 0.0  # when the agent received it, if it could not pass it on at once; 0: now


class SkippedBatch(msgspec.Struct, frozen=True, tag="batch-skipped"):
    """From rank 0: an update was not finite, so it was dropped and its batch skipped (`--on-nan rollback`)."""

    step: int
    what: str  # the loss of which rank, or the gradients
    seconds: float = 0.0  # that the step has cost


class Entering(msgspec.Struct, frozen=True, tag="entering"):
    """The worker has left its group and joins that of this generation.

    `holds`: it has all trained state, so a rank that cannot leave the old group can be replaced without loss.
    """

    generation: int
    holds: bool


class FirstStep(msgspec.Struct, frozen=True, tag="first-step"):
    """The first step of this generation is committed: its group has formed."""

    generation: int
    step: int
    before: int = 0  # the newest step committed before the fault, if known


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The training has ended: this worker does not regroup any more."""

    saved: bool = True  # False: its last checkpoint could not be written


class Keeping(msgspec.Struct, frozen=True, tag="checkpoint-folder"):
    """The folder of the checkpoints."""

    folder: str


class HaltAck(msgspec.Struct, frozen=True, tag="halt-ack"):
    """Answer to Halt: this step is committed.

    `stuck`: no step follows, because something else has ended the turn.
    """

    step: int
    generation: int
    stuck: bool = False


class HaltedAt(msgspec.Struct, frozen=True, tag="halted"):
    """A checkpoint of this step is on disk, and the process ends."""

    step: int


class Rescued(msgspec.Struct, frozen=True, tag="rescued"):
    """Answer to Rescue: all state up to this step is in memory. None: it is not, with the reason."""

    step: int | None = None
    why: str = ""


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="assignment"):
    """The placement of a worker. If its generation is higher than the worker's: leave the group and join this one."""

    generation: int
    placement: RankPlacement
    topology: str
    address: str  # of the store
    port: int
    why: str = ""
    devices: str | None = None  # CUDA_VISIBLE_DEVICES, if this worker has its own
    patience: float = 10.0  # seconds within which the agent reports a failure
    halt: bool = False  # write a checkpoint and end
    preempt: tuple[int, ...] = ()  # signals that the agent handles for the worker


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """There is no rank for this worker: leave the group and wait."""

    why: str = ""
    preempt: tuple[int, ...] = ()


class NoRegroup(msgspec.Struct, frozen=True, tag="no-regroup"):
    """A rank has exited without an error in the middle of the training: the group does not form again."""


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Report the current step, then wait after the next step until `step` is known: the last step to run."""

    step: int | None = None


class Rescue(msgspec.Struct, frozen=True, tag="rescue"):
    """Copy the state to memory that outlives the worker: it cannot leave the group, and no other worker has the
    state.
    """


class EndWorker(msgspec.Struct, frozen=True, tag="end"):
    """Exit by this signal."""

    signal: int
    failed: bool = False  # the run has failed; otherwise it is stopped on request


FromAgent = Assignment | Wait | NoRegroup | Halt | Rescue | EndWorker
FromWorker = (
    Hello
    | Heartbeat
    | MeasuredStep
    | SkippedBatch
    | Entering
    | FirstStep
    | Done
    | Keeping
    | HaltAck
    | HaltedAt
    | Rescued
)
from_worker: Decoder[FromWorker] = Decoder(FromWorker)
from_agent: Decoder[FromAgent] = Decoder(FromAgent)
