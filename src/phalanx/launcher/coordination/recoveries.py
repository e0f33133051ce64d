"""The faults of a run: the decision about each, the line that reports it, and the summary at the end."""

from __future__ import annotations

import time

from phalanx.contract import events
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import Fault, RecoveryAction, RecoveryDecision, RestartPolicy, decide


class Recoveries:
    """Decides about faults and keeps count of them, on the node that decides: the only one, or node 0."""

    def __init__(self, budget: RestartPolicy, folder: RunFolder) -> None:
        self.generation = 0
        self._budget = budget
        self._folder = folder
        self._faults: list[Fault] = []
        self._latest = RecoveryDecision(RecoveryAction.STOP)
        self._moves = 0  # how often nodes joined or left
        self._unrecovered: list[WorkerFailure] = []  # failures since the last committed step
        self._since = 0.0  # when the first of them happened
        self._began = time.monotonic()
        self._stopped = 0.0  # when the stop of all ranks before a restart began
        self._lost = 0.0  # seconds from a fault to the next step or start

    @property
    def latest_action(self) -> RecoveryAction:
        """Return what the latest fault led to."""
        return self._latest.way

    def decide(self, failure: WorkerFailure, *, can_regroup: bool) -> RecoveryAction:
        """Decide about a failure and record it."""
        now = time.monotonic()
        together = bool(self._unrecovered) and 0 <= failure.generation < self.generation
        fault = Fault(failure.place, now, failure.lived, failure.step, together)
        self._latest = decide(self._faults, fault, self._budget, able=can_regroup)
        self._faults.append(fault)
        self._folder.event(
            events.FaultEvent(
                time=failure.time, rank=failure.rank, reason=failure.reason, recovery=self._latest.way.value
            )
        )
        self._note(failure)
        return self._latest.way

    def _note(self, failure: WorkerFailure) -> None:
        if self._latest.way is RecoveryAction.REGROUP:
            self._begin_regroup(failure)
        elif self._latest.way is RecoveryAction.RESTART and not self._stopped:
            self._stopped = time.monotonic()

    def _begin_regroup(self, failure: WorkerFailure) -> None:
        self.generation += 1
        self._since = self._since if self._unrecovered else time.monotonic()
        self._unrecovered.append(failure)

    def nodes_changed(
        self, failure: WorkerFailure, way: RecoveryAction, *, kind: events.FaultKind = "node-lost"
    ) -> None:
        """Record that a node joined or left. It does not count as a restart."""
        self._latest = RecoveryDecision(way)
        self._folder.event(
            events.FaultEvent(
                time=failure.time, rank=failure.rank, reason=failure.reason, recovery=way.value, kind=kind
            )
        )
        self._note(failure)
        self._moves += 1

    def next_generation(self) -> None:
        """Count a regroup without a failure."""
        self.generation += 1

    def first_step(self, generation: int, step: int, before: int = 0) -> str:
        """Return the line that reports a recovery. Empty if there was none: `step` is the first since the failure.

        `before` is the newest step that survivors know of; failed workers reported theirs from time to time.
        """
        if not self._unrecovered or generation != self.generation:
            return ""
        failures, self._unrecovered = self._unrecovered, []
        took = time.monotonic() - self._since
        self._lost += took
        newest = max([before, *(failure.step for failure in failures if failure.step is not None)])
        redone = max(0, newest - (step - 1))
        self._folder.event(
            events.Recovered(time=time.time(), generation=generation, seconds=round(took, 4), step=step, redone=redone)
        )
        who = ", ".join(failure.reason for failure in failures)
        cost = f"{redone} step{'s' if redone > 1 else ''} done again" if redone else "no step lost"
        if not redone and any(failure.all_workers for failure in failures):  # the lost steps are unknown
            cost = f"from step {step - 1} on"
        return f"{who}; regrouped, and step {step} was committed {took:.2f} s later, {cost}"

    def restarting(self) -> str:
        """Return the line that reports a restart: all ranks have ended and are about to start again."""
        took = time.monotonic() - self._stopped if self._stopped else 0.0
        self._stopped = 0.0
        self._lost += took
        self._folder.event(events.Restarted(time=time.time(), seconds=round(took, 4)))
        if not self._latest.used:
            return f"starting all ranks again, {took:.2f} s later"
        most = f" of {self._budget.most}" if self._budget.most is not None else ""
        return f"starting all ranks again: restart {self._latest.used}{most}, {took:.2f} s later"

    def final_text(self, block: str) -> str:
        """Return the last message about a failure, with the reason why it was not recovered."""
        return f"{block}\n  {self._latest.why}" if self._latest.why else block

    def summary(self) -> str:
        """Return the summary of all faults. Empty if there were none."""
        if not self._faults and not self._moves:
            return ""
        whole = time.monotonic() - self._began
        count, moves = len(self._faults), self._moves
        happened = [f"{count} fault{'s' if count > 1 else ''} survived"] * (count > 0)
        happened += [f"{moves} change{'s' if moves > 1 else ''} of nodes"] * (moves > 0)
        if not self.generation:  # the steps lost since the last checkpoint are unknown
            return f"{', '.join(happened)}, {self._lost:.1f} s of {whole:.0f} s until all ranks were started again"
        return (
            f"{', '.join(happened)}, {self._lost:.1f} s of {whole:.0f} s lost: "
            f"goodput {max(0.0, 1 - self._lost / whole):.1%}"
        )
