"""Preemption: the run ends at a step that all ranks agree on, with a checkpoint of that step.

It runs on the node that decides: the only one, or node 0. See train/elastic/halting.py for the agreement of the ranks.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.contract.variables import CHECKPOINTS
from phalanx.launcher.actions import EndRun, HaltWorkers, StopWorkers
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.run_folder import RunFolder

_NEVER = 1 << 62  # more steps than any training has
_TRIES = 3  # regroups at most: a script that always fails would regroup forever


@dataclass(frozen=True)
class RegroupAndHalt:
    """Regroup, so that ranks stop waiting; the new group writes a checkpoint."""

    why: str


PreemptionAction = HaltWorkers | RegroupAndHalt | StopWorkers | EndRun  # for all nodes of the run


class Preemption:
    """Halts a run at a step that all ranks agree on, with a checkpoint. `perform` executes its decisions."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        *,
        perform: Callable[[PreemptionAction], None],
        note: Callable[[str], None],
    ) -> None:
        self.begun = False
        self._shutdown = plan.shutdown
        self._run_folder = folder
        self._perform = perform
        self._note = note
        self._readiness = (False, False)  # connected, finished
        self._checkpoints = plan.environ.get(CHECKPOINTS, "")  # their folder; the script may name another
        self._signal = signal.SIGTERM
        self._began = 0.0
        self._ranks = 0
        self._committed: dict[int, int] = {}  # rank -> committed step
        self._goal: int | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._regroups = 0  # number of regroups that this has caused
        self._step: int | None = None  # of the checkpoint

    @property
    def halted(self) -> bool:
        """Return whether the checkpoint is on disk: later failures lose nothing."""
        return self._step is not None

    def regroup_ready(self, connected: bool, finished: bool) -> None:
        """Record whether ranks can regroup, and whether some have finished."""
        self._readiness = (connected, finished)
        if self.begun and finished:
            self._halt_at_end()

    def begin(self, number: signal.Signals, ranks: int) -> bool:
        """Begin. False: the script cannot halt, or has no folder for checkpoints."""
        if self.begun:
            return True
        if not self._readiness[0]:
            return False
        if not self._checkpoints:
            self._note(
                f"{number.name} received; no folder for checkpoints is known (--checkpoints DIR, or "
                'run.checkpoints("DIR")), so all progress since the start is lost'
            )
            return False
        self.begun, self._signal, self._ranks, self._began = True, number, ranks, time.time()
        grace = self._shutdown.checkpoint_timeout
        self._note(f"{number.name} received; saving a checkpoint at the next step and stopping, in {grace:g} s at most")
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(grace / 2, self._half_time), loop.call_later(grace, self._timed_out)]
        self._perform(HaltWorkers(None))
        self.regroup_ready(*self._readiness)
        return True

    def receive(
        self,
        rank: int,
        message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt,
        generation: int,
    ) -> None:
        """Handle the report of a rank about the halt."""
        match message:
            case worker_messages.Keeping():
                self._checkpoints = message.folder
            case worker_messages.HaltAck() if self.begun:
                self._committed[rank] = message.step
                if message.stuck and message.generation == generation:
                    self._regroup(f"rank {rank} cannot continue")
                elif self._goal is None and len(self._committed) >= self._ranks:
                    self._set_goal(max(self._committed.values()) + 1)
            case worker_messages.HaltedAt() if self.begun and not self.halted:
                self._step = message.step
                took = round(time.time() - self._began, 4)
                self._run_folder.event(events.Preempted(time=time.time(), step=message.step, seconds=took))

    def _set_goal(self, step: int) -> None:
        self._goal = step
        self._perform(HaltWorkers(step))

    def _halt_at_end(self) -> None:
        """Let the other ranks finish too, because one rank has finished its training."""
        if self._goal is None:
            self._set_goal(_NEVER)

    def _regroup(self, why: str) -> None:
        if not self.halted and self._regroups < _TRIES:
            self._regroups += 1
            self._perform(RegroupAndHalt(why))

    def _half_time(self) -> None:
        """Regroup once after half of the time: a rank may wait for another, or be busy with something other than
        steps.
        """
        goal = self._goal
        saving = goal is not None and sum(step >= goal for step in self._committed.values()) >= self._ranks
        if not self._regroups and not saving:
            self._regroup("no step was committed in half of the time")

    def _timed_out(self) -> None:
        if self.halted:
            grace = self._shutdown.failure_timeout
            self._perform(StopWorkers(signal.SIGTERM, "the checkpoint is made", grace, failed=False))
            return
        grace = self._shutdown.checkpoint_timeout
        number = self._signal if self._signal in self._shutdown.signals else signal.SIGTERM
        self._note(f"no checkpoint was made in {grace:g} s (--grace): what {self._checkpoints} has remains")
        self._perform(EndRun(number, f"{number.name}: no time is left for a checkpoint"))

    def close(self) -> None:
        """Cancel the timers: all processes have ended."""
        for timer in self._timers:
            timer.cancel()

    def final_text(self, summary: str) -> str:
        """Return the last message of a preempted run."""
        text = (
            f"preempted by {self._signal.name}: step {self._step} is in {self._checkpoints}; "
            "the same command resumes (exit code 75: run me again)"
        )
        return "\n".join(filter(None, (text, summary)))
