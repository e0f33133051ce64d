"""(what has happened so far, the fault, who could go on) -> what now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

REPEATS = 3  # of one crash, with nothing done in between: it is no accident
OUTSIDE = 10  # of deaths by SIGKILL, likewise: a machine that has too little memory, a rank that hangs at one place
AT_ONCE = 30.0  # seconds after a start. Where a script does not tell its steps, time has to say whether it got anywhere


class RecoveryAction(Enum):
    REGROUP = "regroup"  # survivors stay, the dead are replaced
    RESTART = "restart"  # all ranks are stopped, and started again
    STOP = "stop"


@dataclass(frozen=True)
class Fault:
    """A rank, or several at once, that failed."""

    place: str  # what crashed, and where: the same for two of the same crash. Empty: it came from outside
    time: float
    lived: float  # seconds since the rank was started
    step: int | None = None  # the newest one committed by then, where the script tells
    together: bool = False  # with the one before: a rank of the same group, which was given up already


@dataclass(frozen=True)
class RestartPolicy:
    """So many recoveries; a healthy `window` of seconds fills it again.

    `most` None: the user has not said. A script that can regroup then does so for as long as it makes progress, and
    any other is not started again, as with torchrun.
    """

    most: int | None
    window: float = 3600.0


@dataclass(frozen=True)
class Recovery:
    way: RecoveryAction
    used: int = 0  # recoveries of the budget, with this one
    why: str = ""  # it stops


def decide(past: Sequence[Fault], fault: Fault, budget: RestartPolicy, *, able: bool) -> Recovery:
    """`able`: everybody who is left can regroup."""
    recent = [each for each in since_healthy([*past, fault], budget.window) if not each.together]
    used = len(recent)
    if budget.most == 0 or (budget.most is None and not able):
        return Recovery(RecoveryAction.STOP)
    if repeats(recent) >= REPEATS:
        why = f"not retrying: the same failure {REPEATS} times with no progress"
        return Recovery(RecoveryAction.STOP, used, why)
    # Whoever kills may have reasons that are not the script's; and one that does not tell its steps has a budget.
    if able and kills(recent) >= OUTSIDE:
        why = f"not retrying: killed {OUTSIDE} times with no progress"
        return Recovery(RecoveryAction.STOP, used, why)
    if budget.most is not None and used > budget.most:
        were = "recovery was allowed, and is" if budget.most == 1 else "recoveries were allowed, and are"
        return Recovery(RecoveryAction.STOP, used, f"{budget.most} {were} used up")
    return Recovery(RecoveryAction.REGROUP if able else RecoveryAction.RESTART, used)


def since_healthy(faults: Sequence[Fault], window: float) -> list[Fault]:
    """Those since the run was last well for so long."""
    recent: list[Fault] = []
    for fault in faults:
        if recent and fault.time - recent[-1].time >= window:
            recent = []
        recent.append(fault)
    return recent


def repeats(faults: Sequence[Fault]) -> int:
    """How many at the end are one and the same crash."""
    count = 0
    following: Fault | None = None
    for fault in reversed(faults):
        if not fault.place or (following is not None and not _same(fault, following)):
            break
        count += 1
        following = fault
    return count


def kills(faults: Sequence[Fault]) -> int:
    """How many at the end came from outside, each to a rank that was started after the one before: those who fall
    together count once."""
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
