"""The time lost to faults: the outage that a fault begins, and the total of a run. Callers pass the time."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.launcher.workers.worker import WorkerFailure

_REPORTED = 1.0  # seconds: workers report their steps twice per second, so shorter times are not significant


def lost_before(idle: float) -> float:
    """Return the seconds that were lost before a fault was detected. `idle`: since the last step was reported.

    A rank that hangs is detected long after it stopped. Work since the last step is always lost.
    """
    return idle if idle > _REPORTED else 0.0


def time_of_steps(redone: int, *, took: float, steps: int) -> float:
    """Return the time that `redone` steps have cost, if the last `steps` took that long.

    A training that repeats all of its steps, because it kept no state, has lost all of its time.
    """
    return redone * max(0.0, took) / steps if steps > 0 else 0.0


@dataclass
class Outage:
    """The time without steps: from the first failure to the next committed step, or to the next start of all ranks."""

    failures: list[WorkerFailure] = field(default_factory=list)  # since the last committed step, of regroups
    since: float = 0.0  # when the first of them was detected
    stopped: float = 0.0  # when the stop of all ranks before a restart began
    idle: float = 0.0  # seconds without a step before the fault was detected

    def begin_regroup(self, failure: WorkerFailure, now: float) -> None:
        """Record a failure after which the ranks regroup."""
        if not self.failures:
            self.since, self.idle = now, lost_before(failure.idle)
        self.failures.append(failure)

    def begin_restart(self, failure: WorkerFailure, now: float) -> None:
        """Record a failure after which all ranks start again. Until then only the first one counts."""
        if not self.stopped:
            self.stopped, self.idle = now, lost_before(failure.idle)

    def end_regroup(self) -> tuple[list[WorkerFailure], float]:
        """Return the failures, and the seconds without a step before the first one was detected. Clear both."""
        found = self.failures, self.idle
        self.failures, self.idle = [], 0.0
        return found

    def end_restart(self, now: float) -> tuple[float, float]:
        """Return how long the restart took, and the seconds without a step before it. Clear both."""
        found = now - self.stopped if self.stopped else 0.0, self.idle
        self.stopped, self.idle = 0.0, 0.0
        return found


@dataclass(frozen=True)
class FirstCommit:
    """The first step that a generation has committed."""

    generation: int
    time: float
    step: int


@dataclass
class TrainingTime:
    """How long a run trains, and how much of that time was lost."""

    began: float
    trained: float = 0.0  # when the very first step was committed
    first: FirstCommit | None = None  # of the newest generation that has committed one
    lost: float = 0.0  # seconds from a fault to the next step or start, and those of steps that were computed again

    def step_committed(self, generation: int, step: int, now: float) -> None:
        """Record the first step of a generation. Later ones change nothing."""
        if self.first is None or self.first.generation != generation:
            self.first = FirstCommit(generation, now, step)
            self.trained = self.trained or now
