"""A worker as its agent knows it, and what is known when one fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from phalanx.cluster.placement import Seat
from phalanx.contract import worker_messages
from phalanx.contract.variables import for_cuda
from phalanx.forkserver import wire
from phalanx.launcher.agent.probes import ProbeClient
from phalanx.launcher.runs import root_cause


class WorkerState(Enum):
    """Where a worker is in its life."""

    STARTING = "starting"  # ordered from the fork server
    RUNNING = "running"  # it has a process
    CONNECTED = "connected"  # it has called the agent: it can regroup
    FINISHED = "finished"  # its training is over, and its process is not
    STOPPING = "stopping"  # it was told to stop
    EXITED = "exited"


_FOLLOWS = {
    WorkerState.STARTING: (WorkerState.RUNNING, WorkerState.STOPPING, WorkerState.EXITED),
    WorkerState.RUNNING: (WorkerState.CONNECTED, WorkerState.STOPPING, WorkerState.EXITED),
    WorkerState.CONNECTED: (WorkerState.FINISHED, WorkerState.STOPPING, WorkerState.EXITED),
    WorkerState.FINISHED: (WorkerState.STOPPING, WorkerState.EXITED),
    WorkerState.STOPPING: (WorkerState.EXITED,),
    WorkerState.EXITED: (),
}


@dataclass
class Worker:
    """A worker, as its agent knows it. `enter` moves it from one state to the next."""

    seat: Seat
    folder: str
    pid: int = 0
    born: float = 0.0  # by a clock that nobody sets
    code: int | None = None  # exit code, or minus the signal
    ended: float = 0.0  # by the clock on the wall, which error files go by
    hung: bool = False  # it was killed because it stood still
    ends_as: int | None = None  # the exit code of one that was killed after its script was over
    step: int | None = None  # committed, as far as it has told
    slot_step: int = 0  # optimizer steps that its page showed by then
    steps_match: bool = False  # each of those was one that it committed
    last_heartbeat: float = 0.0  # when it last gave a sign of life; 0: it is none that does
    spare: bool = False  # it waits for a place
    entered: int = -1  # the last generation that it has come to
    holds: bool = False  # with what was trained before
    formed: int = -1  # the last generation that it has committed a step of, as far as it has told
    samples: int = -1  # of its own, as far as it has told
    sampled: float = 0.0  # when it did
    probe: ProbeClient | None = None
    mismatch: wire.Message | None = None  # what it has called, told when others called something else
    raised: wire.Message | None = None  # where it was in its groups when it lost the others: its script has ended
    ending: float = 0.0  # until when it is expected to end of that
    stop_sent: float = 0.0  # when it was told to stop
    blame: Sequence[str] = ()  # who did not come, of one that timed out
    state: WorkerState = WorkerState.STARTING
    _passed: set[WorkerState] = field(default_factory=set)  # states that it has been in

    def enter(self, state: WorkerState) -> bool:
        """Move to `state`. False: that does not follow the state that it is in, and it stays."""
        if state not in _FOLLOWS[self.state]:
            return False
        self.state = state
        self._passed.add(state)
        return True

    @property
    def connected(self) -> bool:
        """It has called the agent: it can regroup, or could."""
        return WorkerState.CONNECTED in self._passed

    @property
    def finished(self) -> bool:
        """Its training has come to its end."""
        return WorkerState.FINISHED in self._passed

    @property
    def stopped(self) -> bool:
        """It was told to stop before it ended."""
        return WorkerState.STOPPING in self._passed


@dataclass(frozen=True)
class WorkerFailure:
    """A worker has failed: what is known at that moment."""

    rank: int
    reason: str
    place: str  # what crashed, and where; empty: it was killed from outside
    time: float
    lived: float
    step: int | None  # the newest that any worker here has committed
    everybody: bool = False  # nobody is left who could hand anything over
    generation: int = -1  # that it was of; -1: it had not come to any yet


def cuda_device(before: worker_messages.Hello | None, environ: Mapping[str, str]) -> int | None:
    """The device on which a replacement may open a CUDA context at birth: that of the worker before it, unless its
    script has changed what CUDA reads. None: it must not."""
    if before is None or before.cuda < 0 or before.variables != for_cuda(environ):
        return None
    return before.cuda


class Workers(Protocol):
    """The workers of a node: what evidence is taken from."""

    @property
    def workers(self) -> Mapping[str, Worker]: ...

    @property
    def debugged(self) -> frozenset[int]: ...

    def process_failure(self, worker: Worker) -> root_cause.ProcessFailure: ...

    def send_signal(self, name: str, number: int, *, alone: bool = False) -> None: ...
