"""What a worker that can regroup and its agent say to each other: one message a packet.

A plain script never calls. One that runs `phalanx.main` calls as soon as it is there, hears where it stands, and from
then on is told when somebody has died and the group forms anew.
"""

from __future__ import annotations

import msgspec

from phalanx.contract import encoding

LARGEST = 1 << 16


class Hello(msgspec.Struct, frozen=True, tag="here"):
    """A worker calls. Who it is, the kernel says."""

    cuda: int = -1  # the CUDA device that it is going to use; -1: none
    variables: dict[str, str] = {}  # those that CUDA reads, as they are now


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """It is alive, and has committed so many steps."""

    step: int
    samples: int = -1  # of its own, in this formation of the group; -1: it does not count them


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """By rank 0, a few times a second at most: what it says of the newest step that is committed."""

    step: int
    epoch: int = 0
    total: int = 0  # steps that it is going to make; 0: that is not known
    values: dict[str, float | None] = {}  # None: not a number


class Entering(msgspec.Struct, frozen=True, tag="entering"):
    """It has left the group before, and comes to that of this generation. `holds`: all that
    was trained, so that a rank which cannot leave the old group can be replaced without loss."""

    generation: int
    holds: bool


class FirstStep(msgspec.Struct, frozen=True, tag="going"):
    """The first step of this generation is committed: its group has formed."""

    generation: int
    step: int
    before: int = 0  # the newest step that any rank had committed when the generation before was lost, if that is known


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Its training has come to its end: it will not regroup any more."""


class Keeping(msgspec.Struct, frozen=True, tag="keeping"):
    """What it trains is kept in checkpoints, there."""

    folder: str


class HaltAck(msgspec.Struct, frozen=True, tag="standing"):
    """It was asked to halt: this step is committed. `stuck`: something else has ended its turn, and no step follows."""

    step: int
    generation: int
    stuck: bool = False


class HaltedAt(msgspec.Struct, frozen=True, tag="halted"):
    """A checkpoint of this step is on the disk, and the process ends."""

    step: int


class Rescued(msgspec.Struct, frozen=True, tag="rescued"):
    """It was asked to: all that it had committed up to this step is in memory. None: it is not, and why."""

    step: int | None = None
    why: str = ""


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="world"):
    """Where a worker stands from now on. A higher generation than its own: leave the group, and join this one."""

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    topology: str
    address: str  # of the store
    port: int
    why: str = ""
    devices: str | None = None  # CUDA_VISIBLE_DEVICES, where it is for this worker alone
    patience: float = 10.0  # seconds in which a death that a rank feels is told it, at the latest
    halt: bool = False  # save what there is, and end
    preempt: tuple[int, ...] = ()  # signals that are the agent's to answer, whoever gets them


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """There is no place for a worker at present: leave the group, if it is in one, and wait until there is."""

    why: str = ""
    preempt: tuple[int, ...] = ()


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Say where you stand, and then go no further than one step until you are told how far. `step`: so far."""

    step: int | None = None


class Rescue(msgspec.Struct, frozen=True, tag="rescue"):
    """It cannot leave the group, and nobody else has what it has: put that into memory that outlives it."""


class EndWorker(msgspec.Struct, frozen=True, tag="end"):
    """This signal is meant: die of it."""

    signal: int


FromSupervisor = Assignment | Wait | Halt | Rescue | EndWorker
FromWorker = Hello | Heartbeat | MeasuredStep | Entering | FirstStep | Done | Keeping | HaltAck | HaltedAt | Rescued
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_agent: msgspec.json.Decoder[FromSupervisor] = msgspec.json.Decoder(FromSupervisor)


def encode(message: FromWorker | FromSupervisor) -> bytes:
    return encoding.encode(message)


def from_worker(packet: bytes) -> FromWorker:
    return _from_worker.decode(packet)


def from_agent(packet: bytes) -> FromSupervisor:
    return _from_agent.decode(packet)
