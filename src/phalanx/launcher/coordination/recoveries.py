"""The faults of a run: the decision about each, the line that reports it, and the summary at the end."""

from __future__ import annotations

import time

from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import Fault, RecoveryAction, RecoveryDecision, RestartPolicy, decide

_REPORTED = 1.0  # seconds: workers report their steps twice per second, so that less than this says nothing
_WORTH_TELLING = 5.0  # seconds without a step before a fault was noticed


def lost_before(idle: float) -> float:
    """Return the seconds that were lost before a fault was noticed. `idle`: since the last step was reported.

    A rank that hangs is noticed long after it stopped. What was computed since the last step is lost in any case.
    """
    return idle if idle > _REPORTED else 0.0


def time_of_steps(redone: int, *, took: float, steps: int) -> float:
    """Return the time that `redone` steps have cost, if the last `steps` took so long.

    A training that repeats all of its steps, because it kept no state, has lost all of its time.
    """
    return redone * max(0.0, took) / steps if steps > 0 else 0.0


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
        self._since = 0.0  # when the first of them was noticed
        self._idle = 0.0  # seconds without a step before that
        self._places: set[str] = set()  # of failures whose frames were shown
        self._began = time.monotonic()
        self._stopped = 0.0  # when the stop of all ranks before a restart began
        self._lost = 0.0  # seconds from a fault to the next step or start, and those of steps that were computed again
        self._first: tuple[int, float, int] | None = None  # generation, time and number of its first committed step
        self._skipped = 0  # batches
        self._trained = 0.0  # when the very first step was committed

    @property
    def latest_action(self) -> RecoveryAction:
        """Return what the latest fault led to."""
        return self._latest.way

    def decide(self, failure: WorkerFailure, *, can_regroup: bool) -> RecoveryAction:
        """Decide about a failure and record it."""
        fault = self._fault(failure)
        self._latest = decide(self._faults, fault, self._budget, able=can_regroup)
        self._faults.append(fault)
        self._folder.event(
            events.FaultEvent(
                time=failure.time,
                rank=failure.rank,
                reason=failure.reason,
                recovery=self._latest.way.value,
                idle=lost_before(failure.idle),
            )
        )
        self._note(failure)
        return self._latest.way

    def would_stop(self, failure: WorkerFailure, *, can_regroup: bool) -> bool:
        """Return whether the decision about a failure would end the run. Nothing is recorded."""
        return decide(self._faults, self._fault(failure), self._budget, able=can_regroup).way is RecoveryAction.STOP

    def _fault(self, failure: WorkerFailure) -> Fault:
        together = bool(self._unrecovered) and 0 <= failure.generation < self.generation
        return Fault(failure.place, time.monotonic(), failure.lived, failure.step, together, failure.hope, failure.rank)

    def _note(self, failure: WorkerFailure) -> None:
        if self._latest.way is RecoveryAction.REGROUP:
            self._begin_regroup(failure)
        elif self._latest.way is RecoveryAction.RESTART and not self._stopped:
            self._stopped, self._idle = time.monotonic(), lost_before(failure.idle)

    def _begin_regroup(self, failure: WorkerFailure) -> None:
        self.generation += 1
        if not self._unrecovered:
            self._since, self._idle = time.monotonic(), lost_before(failure.idle)
        self._unrecovered.append(failure)

    def nodes_changed(
        self, failure: WorkerFailure, way: RecoveryAction, *, kind: events.FaultKind = "node-lost"
    ) -> None:
        """Record that a node joined or left. It does not count as a restart."""
        self._latest = RecoveryDecision(way)
        self._folder.event(
            events.FaultEvent(
                time=failure.time,
                rank=failure.rank,
                reason=failure.reason,
                recovery=way.value,
                kind=kind,
                idle=lost_before(failure.idle),
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
        now, first = time.monotonic(), self._first
        if generation == self.generation and (first is None or first[0] != generation):
            self._first = generation, now, step
            self._trained = self._trained or now
        if not self._unrecovered or generation != self.generation:
            return ""
        failures, self._unrecovered = self._unrecovered, []
        took = now - self._since
        newest = max([before, *(failure.step for failure in failures if failure.step is not None)])
        redone = max(0, newest - (step - 1))
        idle, self._idle = self._idle, 0.0
        self._lost += took + idle
        if first is not None:
            self._lost += time_of_steps(redone, took=self._since - idle - first[1], steps=newest - first[2])
        self._folder.event(
            events.Recovered(
                time=time.time(),
                generation=generation,
                seconds=round(took, 4),
                step=step,
                redone=redone,
                idle=round(idle, 4),
            )
        )
        who = ", ".join(dict.fromkeys(failure.reason for failure in failures))
        where = [line for failure in failures for line in self._new_frames(failure)]
        cost = f"{redone} step{'s' if redone > 1 else ''} done again" if redone else "no step lost"
        if not redone and any(failure.all_workers for failure in failures):  # the lost steps are unknown
            cost = f"from step {step - 1} on"
        cost += f", after {idle:.0f} s without a step" if idle >= _WORTH_TELLING else ""
        text = f"{who}; regrouped, and step {step} was committed {took:.2f} s later, {cost}"
        return "\n".join([text, *where])

    def batch_skipped(self, message: worker_messages.SkippedBatch) -> str:
        """Record an update that was dropped because it was not finite. Return the line that reports it."""
        self._skipped += 1
        self._lost += message.seconds
        reason = f"step {message.step}: {message.what}"
        self._folder.event(
            events.BatchSkipped(time=time.time(), step=message.step, reason=reason, seconds=message.seconds)
        )
        return f"{reason}; its update was dropped and its batch skipped (--on-nan rollback)"

    def _new_frames(self, failure: WorkerFailure) -> tuple[str, ...]:
        """Return where a script failed, unless an earlier line said so."""
        if failure.place in self._places:
            return ()
        self._places.add(failure.place)
        return failure.frames

    def restarting(self) -> str:
        """Return the line that reports a restart: all ranks have ended and are about to start again."""
        took = time.monotonic() - self._stopped if self._stopped else 0.0
        idle, self._stopped, self._idle = self._idle, 0.0, 0.0
        self._lost += took + idle
        self._folder.event(events.Restarted(time=time.time(), seconds=round(took, 4), idle=round(idle, 4)))
        if not self._latest.used:
            return f"starting all ranks again, {took:.2f} s later"
        most = f" of {self._budget.most}" if self._budget.most is not None else ""
        return f"starting all ranks again: restart {self._latest.used}{most}, {took:.2f} s later"

    def final_text(self, block: str) -> str:
        """Return the last message about a failure, with the reason why it was not recovered."""
        return f"{block}\n  {self._latest.why}" if self._latest.why else block

    def summary(self) -> str:
        """Return the summary of all faults. Empty if there were none."""
        if not self._faults and not self._moves and not self._skipped:
            return ""
        now = time.monotonic()
        lost = self._lost + self._folder.stalled
        count, moves = len(self._faults), self._moves
        happened = [f"{count} fault{'s' if count > 1 else ''} survived"] * (count > 0)
        happened += [f"{moves} change{'s' if moves > 1 else ''} of nodes"] * (moves > 0)
        skipped = self._skipped
        happened += [f"{skipped} batch{'es' if skipped > 1 else ''} skipped"] * (skipped > 0)
        if not self.generation and not skipped:  # the steps lost since the last checkpoint are unknown
            whole = now - self._began
            return f"{', '.join(happened)}, {self._lost:.1f} s of {whole:.0f} s until all ranks were started again"
        whole = max(now - (self._trained or self._began), 1e-3)
        self._folder.event(events.GoodputMeasured(time=time.time(), lost=lost, seconds=whole))
        return f"{', '.join(happened)}, {lost:.1f} s of {whole:.0f} s lost: goodput {max(0.0, 1 - lost / whole):.1%}"
