"""The agent's record of a worker, and what is known when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from phalanx.cluster.placement import Seat
from phalanx.contract.messages import worker_messages
from phalanx.contract.variables import for_cuda
from phalanx.forkserver import wire
from phalanx.launcher.workers.probes import ProbeClient
from phalanx.recover.decision import RetryChance

logger = logging.getLogger(__name__)


class WorkerState(Enum):
    """The states of a worker."""

    STARTING = "starting"  # ordered from the fork server
    RUNNING = "running"  # it has a process
    CONNECTED = "connected"  # to the agent: it can regroup
    FINISHED = "finished"  # its training has ended, its process has not
    STOPPING = "stopping"  # it was asked to stop
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
class StepProgress:
    """The committed steps and training samples that a worker has reported."""

    step: int | None = None  # newest committed step
    slot_step: int = 0  # optimizer steps of its status slot at that time
    steps_match: bool = False  # each optimizer step is one committed step
    samples: int = -1  # training samples; -1: unknown
    sampled: float = 0.0  # when it reported them
    stepped: float = 0.0  # when it last reported a newer step; 0: never

    def committed(self, step: int, slot_step: int) -> None:
        """Record a committed step, and the optimizer steps of the status slot at this time."""
        if step > (self.step or 0):
            self.stepped = time.monotonic()
        self.steps_match = abs(slot_step - self.slot_step - step + (self.step or 0)) <= 1
        self.step, self.slot_step = step, slot_step


@dataclass
class ReportedGenerations:
    """The generations that a worker has reported."""

    entered: int = -1  # the newest that it has joined
    holds: bool = False  # it joined with all trained state
    formed: int = -1  # the newest of which it reported a committed step
    blocked: bool = False  # its GPU does not let it leave the one that was lost


@dataclass
class ExitContext:
    """What is known about the end of a worker besides its exit code. Most of it is known before the exit."""

    hung: bool = False  # it was killed because of a stall
    with_fork_server: bool = False  # it died with the fork server
    memory: str = ""  # what the kernel reports about memory, if it was killed for that
    counts_as: int | None = None  # the exit code of a worker that was killed after its script was over
    mismatch: wire.Message | None = None  # its collective, if the ranks called different ones
    raised: wire.Message | None = None  # the state of its groups when an exception about other ranks ended its script
    deadline: float = 0.0  # until when it should exit after that
    stop_sent: float = 0.0  # when it was asked to stop
    blame: Sequence[str] = ()  # who caused its timeout
    unsaved: bool = False  # its training is complete, but the last checkpoint could not be written

    @property
    def expected(self) -> bool:
        """Return whether it should exit soon, after an exception about other ranks."""
        return self.deadline > time.monotonic()


@dataclass
class Worker:
    """The agent's record of a worker. `enter` moves it to the next state."""

    seat: Seat
    folder: str
    pid: int = 0
    started_at: float = 0.0  # monotonic clock
    code: int | None = None  # exit code, or minus the signal
    ended: float = 0.0  # wall clock, as in error files
    last_heartbeat: float = 0.0  # 0: it has never connected
    spare: bool = False  # it waits to replace another worker
    outlives: bool = False  # outlives its fork server: it can regroup, and this process would adopt it
    probe: ProbeClient | None = None
    progress: StepProgress = field(default_factory=StepProgress)
    generations: ReportedGenerations = field(default_factory=ReportedGenerations)
    exit: ExitContext = field(default_factory=ExitContext)
    state: WorkerState = WorkerState.STARTING
    _passed: set[WorkerState] = field(default_factory=set)  # states that it was in

    def enter(self, state: WorkerState) -> bool:
        """Move to `state`. False: that state does not follow the current one, which is kept."""
        if state not in _FOLLOWS[self.state]:
            return False
        logger.debug("rank %d, pid %d: %s, was %s", self.seat.rank, self.pid, state.value, self.state.value)
        self.state = state
        self._passed.add(state)
        return True

    def exited(self, code: int) -> None:
        """Record its exit code."""
        self.enter(WorkerState.EXITED)
        self.code, self.ended = code, time.time()

    def committed(self, step: int) -> None:
        """Record a committed step that it reported."""
        self.progress.committed(step, self.probe.step if self.probe is not None else 0)

    @property
    def connected(self) -> bool:
        """Return whether it has connected to the agent, and so can regroup."""
        return WorkerState.CONNECTED in self._passed

    @property
    def finished(self) -> bool:
        """Return whether its training has ended."""
        return WorkerState.FINISHED in self._passed

    @property
    def stopped(self) -> bool:
        """Return whether it was asked to stop before it ended."""
        return WorkerState.STOPPING in self._passed


@dataclass(frozen=True)
class WorkerFailure:
    """What is known about a failure when it is detected."""

    rank: int
    reason: str
    place: str  # what crashed, and where; empty: it was killed from outside
    time: float
    uptime: float
    step: int | None  # newest committed step of any worker here
    all_workers: bool = False  # no remaining worker has the state
    generation: int = -1  # of the worker; -1: it had not joined any
    retry_chance: RetryChance = "some"  # likelihood that a retry succeeds
    frames: tuple[str, ...] = ()  # lines about where the script failed
    idle: float = 0.0  # seconds since a worker here last reported a newer step


def cuda_device(before: worker_messages.Hello | None, environ: Mapping[str, str]) -> int | None:
    """Return the device on which a replacement may open a CUDA context early: that of the previous worker.

    None: the script of that worker has changed variables that CUDA reads, or used no device.
    """
    if before is None or before.cuda < 0 or before.variables != for_cuda(environ):
        return None
    return before.cuda
