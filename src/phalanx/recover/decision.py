"""Decides what follows a fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

REPEATS = 3  # of the same crash without progress: stop
OUTSIDE = 10  # deaths by SIGKILL without progress: too little memory, or a rank that always hangs
AT_ONCE = 30.0  # seconds after a start without progress, if the script does not report its steps


class RecoveryAction(Enum):
    """What follows a fault."""

    REGROUP = "regroup"  # survivors stay, the dead are replaced
    RESTART = "restart"  # all ranks are stopped, and started again
    STOP = "stop"


@dataclass(frozen=True)
class Fault:
    """A failure of one rank, or of several at once."""

    place: str  # what crashed, and where: equal for the same crash. Empty: killed from outside
    time: float
    lived: float  # seconds since the rank was started
    step: int | None = None  # the newest committed step, if known
    together: bool = False  # of the same group as the previous fault


@dataclass(frozen=True)
class RestartPolicy:
    """How many recoveries are allowed. After a healthy `window` of seconds, counting starts again.

    `most` None: not given. A script that can regroup then does so as long as it makes progress; any other script is not
    restarted, as with torchrun.
    """

    most: int | None
    window: float = 3600.0


@dataclass(frozen=True)
class RecoveryDecision:
    """The decision about a fault."""

    way: RecoveryAction
    used: int = 0  # recoveries of the budget, with this one
    why: str = ""  # it stops


def decide(past: Sequence[Fault], fault: Fault, budget: RestartPolicy, *, able: bool) -> RecoveryDecision:
    """Return what to do about a fault. `able`: all survivors can regroup."""
    recent = [each for each in since_healthy([*past, fault], budget.window) if not each.together]
    used = len(recent)
    if budget.most == 0 or (budget.most is None and not able):
        return RecoveryDecision(RecoveryAction.STOP)
    if repeats(recent) >= REPEATS:
        why = f"not retrying: the same failure {REPEATS} times with no progress"
        return RecoveryDecision(RecoveryAction.STOP, used, why)
    # A kill may have reasons outside of the script, so more of them are allowed.
    if able and kills(recent) >= OUTSIDE:
        why = f"not retrying: killed {OUTSIDE} times with no progress"
        return RecoveryDecision(RecoveryAction.STOP, used, why)
    if budget.most is not None and used > budget.most:
        were = "recovery was allowed, and is" if budget.most == 1 else "recoveries were allowed, and are"
        return RecoveryDecision(RecoveryAction.STOP, used, f"{budget.most} {were} used up")
    return RecoveryDecision(RecoveryAction.REGROUP if able else RecoveryAction.RESTART, used)


def since_healthy(faults: Sequence[Fault], window: float) -> list[Fault]:
    """Return the faults since the run was last healthy for `window` seconds."""
    recent: list[Fault] = []
    for fault in faults:
        if recent and fault.time - recent[-1].time >= window:
            recent = []
        recent.append(fault)
    return recent


def repeats(faults: Sequence[Fault]) -> int:
    """Return how many faults at the end are the same crash."""
    count = 0
    following: Fault | None = None
    for fault in reversed(faults):
        if not fault.place or (following is not None and not _same(fault, following)):
            break
        count += 1
        following = fault
    return count


def kills(faults: Sequence[Fault]) -> int:
    """Return how many faults at the end came from outside. Faults at the same time count once."""
    count = 0
    first = last = None
    for fault in faults:
        if fault.place:
            count, first = 0, None
        elif first is None or last is None or not _same(last, fault):
            count, first = 1, fault
        elif fault.lived <= fault.time - first.time:
            count, first = count + 1, fault
        last = fault
    return count


def _same(before: Fault, after: Fault) -> bool:
    if before.place != after.place:
        return False
    if before.step is not None and after.step is not None:
        return after.step <= before.step
    return after.lived <= AT_ONCE
