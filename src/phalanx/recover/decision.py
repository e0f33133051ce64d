"""Decides what follows a fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

REPEATS = 3  # the same crash this often without progress: stop
OUTSIDE = 10  # deaths by SIGKILL without progress: too little memory, or a rank that always hangs
SOON = 300.0  # seconds after a start in which an error of the script is not retried
TRIES = 10  # failures of one rank with the same exception at the same line, although other ranks commit steps
TRIES_WINDOW = 600.0  # seconds within which these failures count
STORE_STARTS = 3  # stores that end before they answer; after these, pause before starting the next
STORE_PAUSE = 30.0  # seconds
AT_ONCE = 30.0  # seconds after a start without progress, if the script does not report its steps


# How likely another try is to succeed. "over": the training is complete, and only its last checkpoint could not be
# written. "stopped": the training has stopped itself (`--on-nan`). "none": an error in the script or its arguments.
# "little": the script raised an exception by itself.
RetryChance = Literal["over", "stopped", "none", "little", "some"]


class RecoveryAction(Enum):
    """What follows a fault."""

    REGROUP = "regroup"  # surviving workers stay, dead ones are replaced
    RESTART = "restart"  # all ranks are stopped, and started again
    STOP = "stop"


@dataclass(frozen=True)
class Fault:
    """A failure of one rank, or of several at once."""

    place: str  # what crashed, and where: equal for the same crash. Empty: killed from outside
    time: float  # monotonic clock
    uptime: float  # seconds since the rank was started
    step: int | None = None  # the newest committed step, if known
    together: bool = False  # part of the same failure as the previous fault
    retry_chance: RetryChance = "some"  # how likely another try is to succeed
    rank: int = -1  # the first rank that failed

    @property
    def before_first_step(self) -> bool:
        """Return whether no step is known to be committed."""
        return not self.step


@dataclass(frozen=True)
class RestartPolicy:
    """How many recoveries are allowed. After `window` healthy seconds, counting starts again.

    `most` is None if the user gave no limit. A script that can regroup then does so as long as it makes progress; any
    other script is not restarted, as with torchrun.
    """

    most: int | None
    window: float = 3600.0


@dataclass(frozen=True)
class RecoveryDecision:
    """The decision about a fault."""

    action: RecoveryAction
    used: int = 0  # recoveries used, including this one
    why: str = ""  # why the run stops


def decide(past: Sequence[Fault], fault: Fault, budget: RestartPolicy, *, able: bool) -> RecoveryDecision:
    """Decide what to do about a fault. `able`: all survivors can regroup."""
    recent = [each for each in since_healthy([*past, fault], budget.window) if not each.together]
    used = len(recent)
    if budget.most == 0 or (budget.most is None and not able):
        return RecoveryDecision(RecoveryAction.STOP)
    if fault.retry_chance == "over":
        return RecoveryDecision(RecoveryAction.STOP, used, "not retrying: the training is complete")
    if fault.retry_chance == "stopped":
        return RecoveryDecision(RecoveryAction.STOP, used, "not retrying: --on-nan has stopped the training")
    if fault.retry_chance == "none" and fault.before_first_step and fault.uptime < SOON:
        return RecoveryDecision(RecoveryAction.STOP, used, "not retrying: an error in the script or its arguments")
    if fault.retry_chance == "none" and any(_same(each, fault) for each in past):
        why = "not retrying: the same error in the script or its arguments twice, with no progress"
        return RecoveryDecision(RecoveryAction.STOP, used, why)
    if able and (before := fails_again(past, fault)) is not None:
        where = "two ranks" if before.rank != fault.rank else "the second try"
        why = f"not retrying: the same failure on {where}, before the first step was committed"
        return RecoveryDecision(RecoveryAction.STOP, used, why)
    if repeats(recent) >= REPEATS:
        why = f"not retrying: the same failure {REPEATS} times with no progress"
        return RecoveryDecision(RecoveryAction.STOP, used, why)
    if raises_each_time(recent):
        why = (
            f"not retrying: rank {fault.rank} failed {TRIES} times in a row at the same line within "
            f"{TRIES_WINDOW / 60:.0f} minutes"
        )
        return RecoveryDecision(RecoveryAction.STOP, used, why)
    # A kill may have reasons outside the script, so more of them are allowed.
    if able and kills(recent) >= OUTSIDE:
        why = f"not retrying: killed {OUTSIDE} times with no progress"
        return RecoveryDecision(RecoveryAction.STOP, used, why)
    if budget.most is not None and used > budget.most:
        were = "recovery was allowed, and is" if budget.most == 1 else "recoveries were allowed, and are"
        return RecoveryDecision(RecoveryAction.STOP, used, f"{budget.most} {were} used up")
    return RecoveryDecision(RecoveryAction.REGROUP if able else RecoveryAction.RESTART, used)


def fails_again(past: Sequence[Fault], fault: Fault) -> Fault | None:
    """Return the earlier fault with the same exception, on any rank, if the run never committed a step.

    If all ranks are new, their fault has no step, although the run may have committed steps before they started.
    """
    if fault.retry_chance == "some" or not all(each.before_first_step for each in (*past, fault)):
        return None
    return next((each for each in past if each.place == fault.place), None)


def raises_each_time(faults: Sequence[Fault]) -> bool:
    """Return whether one rank raised the same exception at the same line in each of the last faults.

    Other ranks may commit a step between two of these faults. That is progress, but it costs a recovery each time.
    """
    last = faults[-TRIES:]
    if len(last) < TRIES or last[-1].time - last[0].time > TRIES_WINDOW:
        return False
    return last[0].retry_chance != "some" and len({(fault.rank, fault.place) for fault in last}) == 1


def store_delay(failed_starts: int) -> float:
    """Return the seconds to wait before starting a store, if the last `failed_starts` stores never answered."""
    return STORE_PAUSE if failed_starts >= STORE_STARTS else 0.0


def since_healthy(faults: Sequence[Fault], window: float) -> list[Fault]:
    """Return the faults since the run was last healthy for `window` seconds."""
    recent: list[Fault] = []
    for fault in faults:
        if recent and fault.time - recent[-1].time >= window:
            recent = []
        recent.append(fault)
    return recent


def repeats(faults: Sequence[Fault]) -> int:
    """Return how many of the latest faults are the same crash."""
    count = 0
    following: Fault | None = None
    for fault in reversed(faults):
        if not fault.place or (following is not None and not _same(fault, following)):
            break
        count += 1
        following = fault
    return count


def kills(faults: Sequence[Fault]) -> int:
    """Return how many of the latest faults came from outside. Faults at the same time count once."""
    count = 0
    first = last = None
    for fault in faults:
        if fault.place:
            count, first = 0, None
        elif first is None or last is None or not _same(last, fault):
            count, first = 1, fault
        elif fault.uptime <= fault.time - first.time:
            count, first = count + 1, fault
        last = fault
    return count


def _same(before: Fault, after: Fault) -> bool:
    if before.place != after.place:
        return False
    if before.step is not None and after.step is not None:
        return after.step <= before.step
    return after.uptime <= AT_ONCE
