"""The faults of a run: the decision about each, the line that reports it, and the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.diagnose import words
from phalanx.launcher.coordination.lost_time import Outage, TrainingTime, lost_before, time_of_steps
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import Fault, RecoveryAction, RecoveryDecision, RestartPolicy, decide

_WORTH_TELLING = 5.0  # seconds without a step before a fault was detected


class Recoveries:
    """Decides about faults and keeps count of them, on the node that decides: the only one, or node 0."""

    def __init__(self, budget: RestartPolicy, folder: RunFolder) -> None:
        self.generation = 0
        self._budget = budget
        self._folder = folder
        self._faults: list[Fault] = []
        self._latest = RecoveryDecision(RecoveryAction.STOP)
        self._moves = 0  # how often nodes joined or left
        self._skipped = 0  # batches
        self._outage = Outage()
        self._time = TrainingTime(time.monotonic())
        self._places: set[str] = set()  # of failures whose frames were shown

    @property
    def latest_action(self) -> RecoveryAction:
        """Return the action for the latest fault."""
        return self._latest.action

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
                recovery=self._latest.action.value,
                idle=lost_before(failure.idle),
            )
        )
        self._note(failure)
        return self._latest.action

    def would_stop(self, failure: WorkerFailure, *, can_regroup: bool) -> bool:
        """Return whether the decision about a failure would end the run. Nothing is recorded."""
        return decide(self._faults, self._fault(failure), self._budget, able=can_regroup).action is RecoveryAction.STOP

    def _fault(self, failure: WorkerFailure) -> Fault:
        together = bool(self._outage.failures) and 0 <= failure.generation < self.generation
        return Fault(
            failure.place, time.monotonic(), failure.uptime, failure.step, together, failure.retry_chance, failure.rank
        )

    def _note(self, failure: WorkerFailure) -> None:
        if self._latest.action is RecoveryAction.REGROUP:
            self.generation += 1
            self._outage.begin_regroup(failure, time.monotonic())
        elif self._latest.action is RecoveryAction.RESTART:
            self._outage.begin_restart(failure, time.monotonic())

    def nodes_changed(
        self, failure: WorkerFailure, action: RecoveryAction, *, kind: events.FaultKind = "node-lost"
    ) -> None:
        """Record that a node joined or left. It does not count as a restart."""
        self._latest = RecoveryDecision(action)
        self._folder.event(
            events.FaultEvent(
                time=failure.time,
                rank=failure.rank,
                reason=failure.reason,
                recovery=action.value,
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

        `before` is the newest step that survivors know; failed workers reported theirs at intervals.
        """
        now, first = time.monotonic(), self._time.first
        if generation == self.generation:
            self._time.step_committed(generation, step, now)
        if not self._outage.failures or generation != self.generation:
            return ""
        since = self._outage.since
        failures, idle = self._outage.end_regroup()
        took = now - since
        newest = max([before, *(failure.step for failure in failures if failure.step is not None)])
        redone = max(0, newest - (step - 1))
        self._time.lost += took + idle
        if first is not None:
            self._time.lost += time_of_steps(redone, took=since - idle - first.time, steps=newest - first.step)
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
        who = reasons(failures)
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
        self._time.lost += message.seconds
        reason = f"step {message.step}: {message.what}"
        self._folder.event(
            events.BatchSkipped(time=time.time(), step=message.step, reason=reason, seconds=message.seconds)
        )
        return f"{reason}; its update was dropped and its batch skipped (--on-nan rollback)"

    def _new_frames(self, failure: WorkerFailure) -> tuple[str, ...]:
        """Return where a script failed, unless an earlier line reported it."""
        if failure.place in self._places:
            return ()
        self._places.add(failure.place)
        return failure.frames

    def restarting(self) -> str:
        """Return the line that reports a restart: all ranks have ended and are about to start again."""
        took, idle = self._outage.end_restart(time.monotonic())
        self._time.lost += took + idle
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
        lost = self._time.lost + self._folder.stalled
        count, moves = len(self._faults), self._moves
        happened = [f"{count} fault{'s' if count > 1 else ''} survived"] * (count > 0)
        happened += [f"{moves} change{'s' if moves > 1 else ''} of nodes"] * (moves > 0)
        skipped = self._skipped
        happened += [f"{skipped} batch{'es' if skipped > 1 else ''} skipped"] * (skipped > 0)
        if not self.generation and not skipped:  # the steps lost since the last checkpoint are unknown
            whole = now - self._time.began
            return f"{', '.join(happened)}, {self._time.lost:.1f} s of {whole:.0f} s until all ranks were started again"
        if not self._time.trained:
            return f"{', '.join(happened)}; no step was committed"
        whole = max(now - self._time.trained, 1e-3)
        self._folder.event(events.GoodputMeasured(time=time.time(), lost=lost, seconds=whole))
        return f"{', '.join(happened)}, {lost:.1f} s of {whole:.0f} s lost: goodput {max(0.0, 1 - lost / whole):.1%}"


def reasons(failures: Sequence[WorkerFailure]) -> str:
    """Return the reasons of failures at one time: an exception that several ranks have raised is named once."""
    kinds: list[list[WorkerFailure]] = []
    for failure in failures:
        # Without a place it was killed from outside.
        same = next((kind for kind in kinds if _alike(kind[0], failure)), None) if failure.place else None
        if same is None:
            kinds.append([failure])
        elif len(failure.reason) < len(same[0].reason):  # the others quote its message
            same.insert(0, failure)
        else:
            same.append(failure)
    found: dict[str, None] = {}
    for first, *others in kinds:
        found[first.reason] = None
        if ranks := sorted({other.rank for other in others} - {first.rank}):
            found[f"{words.who(ranks)} failed in the same way"] = None
    return ", ".join(found)


def _alike(one: WorkerFailure, other: WorkerFailure) -> bool:
    """Return whether two ranks have raised the same exception, or one of them quotes the other's."""
    short, long = sorted((failure.reason.partition(" failed: ")[2] for failure in (one, other)), key=len)
    if one.place == other.place:
        return bool(short) and _class(short) == _class(long)
    return ": " in short and short in long  # a class without a message is no quotation


def _class(exception: str) -> str:
    return exception.partition(" ")[0].removesuffix(":")
