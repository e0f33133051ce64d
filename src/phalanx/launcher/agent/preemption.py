"""A run that is preempted: it ends at a step that all ranks agree on, with a checkpoint of it, and can go on later.

Of the node that decides: the only one, or node 0. How the ranks agree: train/elastic/halting.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Protocol

from phalanx.contract import events, worker_messages
from phalanx.contract.variables import CHECKPOINTS
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.run_folder import RunFolder

_NEVER = 1 << 62  # a step that no training gets to
_TRIES = 3  # a script that fails wherever it is entered would be entered for ever


class PreemptionActions(Protocol):
    """For all nodes of the run."""

    def note(self, text: str) -> None: ...
    def halt(self, step: int | None) -> None: ...

    def regroup_and_halt(self, why: str) -> None:
        """Whoever waits stops waiting, and the group that forms saves what there is."""

    def stop(self, reason: str) -> None:
        """Whoever has not ended yet."""

    def end_run(self, number: signal.Signals, reason: str) -> None:
        """It ends as by any signal."""


class Preemption:
    def __init__(self, plan: Plan, folder: RunFolder, actions: PreemptionActions) -> None:
        self.begun = False
        self._shutdown = plan.shutdown
        self._run_folder = folder
        self._actions = actions
        self._readiness = (False, False)  # ranks have called that can halt; some are through with their work
        self._checkpoints = plan.environ.get(CHECKPOINTS, "")  # their folder, unless the script names another
        self._signal = signal.SIGTERM
        self._began = 0.0
        self._ranks = 0
        self._committed: dict[int, int] = {}  # rank -> step
        self._goal: int | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._regroups = 0  # how often the group was formed anew for it
        self._step: int | None = None  # of the checkpoint

    @property
    def halted(self) -> bool:
        """The checkpoint is there: whatever happens now, nothing is lost."""
        return self._step is not None

    def regroup_ready(self, called: bool, ended: bool) -> None:
        self._readiness = (called, ended)
        if self.begun and ended:
            self._halt_at_end()

    def begin(self, number: signal.Signals, ranks: int) -> bool:
        """False: it is a plain script, or one that keeps nothing."""
        if self.begun:
            return True
        if not self._readiness[0]:
            return False
        if not self._checkpoints:
            self._actions.note(
                f"{number.name} received; no folder for checkpoints is known (--checkpoints DIR, or "
                "run.keep(folder=…)), so what was trained since the start is lost"
            )
            return False
        self.begun, self._signal, self._ranks, self._began = True, number, ranks, time.time()
        grace = self._shutdown.checkpoint_timeout
        self._actions.note(
            f"{number.name} received; a checkpoint at the next step, and then the end, in {grace:g} s at most"
        )
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(grace / 2, self._half_time), loop.call_later(grace, self._timed_out)]
        self._actions.halt(None)
        self.regroup_ready(*self._readiness)
        return True

    def receive(
        self,
        rank: int,
        message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt,
        generation: int,
    ) -> None:
        match message:
            case worker_messages.Keeping():
                self._checkpoints = message.folder
            case worker_messages.HaltAck() if self.begun:
                self._committed[rank] = message.step
                if message.stuck and message.generation == generation:
                    self._regroup(f"rank {rank} cannot go on")
                elif self._goal is None and len(self._committed) >= self._ranks:
                    self._set_goal(max(self._committed.values()) + 1)
            case worker_messages.HaltedAt() if self.begun and not self.halted:
                self._step = message.step
                took = round(time.time() - self._began, 4)
                self._run_folder.event(events.Preempted(time=time.time(), step=message.step, seconds=took))

    def _set_goal(self, step: int) -> None:
        self._goal = step
        self._actions.halt(step)

    def _halt_at_end(self) -> None:
        """The training of a rank has ended by itself; so do those of the others, unless they are held."""
        if self._goal is None:
            self._set_goal(_NEVER)

    def _regroup(self, why: str) -> None:
        if not self.halted and self._regroups < _TRIES:
            self._regroups += 1
            self._actions.regroup_and_halt(why)

    def _half_time(self) -> None:
        """Half of the time is over. A rank may wait for another for long, or do something else than steps."""
        goal = self._goal
        saving = goal is not None and sum(step >= goal for step in self._committed.values()) >= self._ranks
        if not self._regroups and not saving:
            self._regroup("no step was committed in half of the time")

    def _timed_out(self) -> None:
        if self.halted:
            self._actions.stop("the checkpoint is made")
            return
        grace = self._shutdown.checkpoint_timeout
        number = self._signal if self._signal in self._shutdown.signals else signal.SIGTERM
        self._actions.note(f"no checkpoint was made in {grace:g} s (--grace): what {self._checkpoints} has remains")
        self._actions.end_run(number, f"{number.name}: the time for a checkpoint is over")

    def close(self) -> None:
        """Every process has ended."""
        for timer in self._timers:
            timer.cancel()

    def final_text(self, summary: str) -> str:
        text = (
            f"preempted by {self._signal.name}: step {self._step} is in {self._checkpoints}; "
            "the same command goes on from there (exit code 75: run me again)"
        )
        return "\n".join(filter(None, (text, summary)))
