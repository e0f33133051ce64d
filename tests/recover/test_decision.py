"""RecoveryDecision as a table: no process, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.recover.decision import (
    AT_ONCE,
    OUTSIDE,
    REPEATS,
    STORE_STARTS,
    TRIES,
    TRIES_WINDOW,
    Fault,
    RecoveryAction,
    RecoveryDecision,
    RestartPolicy,
    decide,
    kills,
    repeats,
    store_delay,
)

HOUR = 3600.0


def faults(*times: float, place: str = "", step: int | None = None, uptime: float = 100.0) -> list[Fault]:
    return [Fault(place, time, uptime, step) for time in times]


@pytest.mark.parametrize(
    ("most", "able", "past", "action", "used"),
    [
        (None, True, 0, RecoveryAction.REGROUP, 1),
        (None, True, 500, RecoveryAction.REGROUP, 501),
        (None, False, 0, RecoveryAction.STOP, 0),
        (0, True, 0, RecoveryAction.STOP, 0),
        (2, False, 0, RecoveryAction.RESTART, 1),
        (2, False, 1, RecoveryAction.RESTART, 2),
        (2, False, 2, RecoveryAction.STOP, 3),
        (2, True, 1, RecoveryAction.REGROUP, 2),
        (2, True, 2, RecoveryAction.STOP, 3),
    ],
)
def test_budget(most: int | None, able: bool, past: int, action: RecoveryAction, used: int) -> None:
    *before, last = faults(*(10.0 * number for number in range(past + 1)))
    recovery = decide(before, last, RestartPolicy(most), able=able)
    assert (recovery.action, recovery.used) == (action, used)


def test_healthy_window_fills_the_budget_again() -> None:
    past = faults(0.0, 10.0, 20.0)
    assert decide(past, *faults(19.0 + HOUR), RestartPolicy(3), able=False).action is RecoveryAction.STOP
    assert decide(past, *faults(20.0 + HOUR), RestartPolicy(3), able=False) == RecoveryDecision(
        RecoveryAction.RESTART, 1
    )
    assert decide(past, *faults(81.0), RestartPolicy(3, window=60.0), able=False) == RecoveryDecision(
        RecoveryAction.RESTART, 1
    )


@pytest.mark.parametrize(
    ("what", "action"),
    [
        ({"place": "ValueError train.py:3", "uptime": 1.0}, RecoveryAction.STOP),
        ({"place": "ValueError train.py:3", "uptime": AT_ONCE + 1}, RecoveryAction.RESTART),
        ({"place": "ValueError train.py:3", "step": 7}, RecoveryAction.STOP),
        ({"place": "", "uptime": 1.0}, RecoveryAction.RESTART),
    ],
)
def test_crash_that_only_repeats_ends_the_run(what: dict[str, object], action: RecoveryAction) -> None:
    *past, last = faults(*map(float, range(REPEATS)), **what)  # type: ignore[arg-type]
    assert decide(past[1:], last, RestartPolicy(10), able=False).action is RecoveryAction.RESTART
    recovery = decide(past, last, RestartPolicy(10), able=False)
    assert recovery.action is action
    assert (action is RecoveryAction.STOP) == ("same failure" in recovery.why)


def test_ranks_that_fail_together_are_one_fault() -> None:
    crash = Fault("ValueError train.py:3", 0.0, 1.0, 5)
    others = [replace(crash, together=True)] * 3
    assert decide([crash, *others[1:]], others[0], RestartPolicy(1), able=True) == RecoveryDecision(
        RecoveryAction.REGROUP, 1
    )
    assert decide([crash, *others], crash, RestartPolicy(None), able=True) == RecoveryDecision(
        RecoveryAction.REGROUP, 2
    )
    assert decide([crash, *others] * (REPEATS - 1), crash, RestartPolicy(None), able=True).action is RecoveryAction.STOP


def test_progress_or_another_crash_in_between_is_no_repetition() -> None:
    crash = [Fault("A", float(step), 1.0, step) for step in (5, 6, 6)]
    assert repeats(crash) == 2
    assert repeats([crash[0], Fault("B", 1.0, 1.0, 5), crash[1]]) == 1
    assert repeats([crash[0], Fault("", 1.0, 1.0, 5), crash[0]]) == 1
    assert repeats([]) == 0


def test_killed_again_and_again_at_one_step_ends_too() -> None:
    """For example, out of memory at every try. With progress in between, the run continues."""
    *past, last = faults(*(60.0 * number for number in range(OUTSIDE)), step=7, uptime=9.0)
    assert decide(past[1:], last, RestartPolicy(None), able=True).action is RecoveryAction.REGROUP
    recovery = decide(past, last, RestartPolicy(None), able=True)
    assert (recovery.action, f"killed {OUTSIDE} times" in recovery.why) == (RecoveryAction.STOP, True)
    assert (
        decide([*past[:-1], Fault("", 600.0, 9.0, 6)], last, RestartPolicy(None), able=True).action
        is RecoveryAction.REGROUP
    )
    assert decide(past, Fault("", 700.0, 9.0, 8), RestartPolicy(None), able=True).action is RecoveryAction.REGROUP
    assert decide(past, last, RestartPolicy(50), able=False).action is RecoveryAction.RESTART
    assert kills(faults(*(100 + number / 100 for number in range(64)), step=5, uptime=90.0)) == 1  # at the same time


def test_an_error_of_the_script_is_not_retried() -> None:
    bad = Fault("SyntaxError a.py:3", 10.0, 2.0, None, retry_chance="none")
    for able, most in ((True, None), (False, 3)):
        stopped = decide([], bad, RestartPolicy(most), able=able)
        assert stopped.action is RecoveryAction.STOP
        assert stopped.why == "not retrying: an error in the script or its arguments"
    # After committed steps, or hours of a script that does not report them, an import may fail by chance.
    assert decide([], replace(bad, step=9), RestartPolicy(None), able=True).action is RecoveryAction.REGROUP
    assert decide([], replace(bad, uptime=HOUR), RestartPolicy(3), able=False).action is RecoveryAction.RESTART
    # On a second rank, or in a second try, it is not chance.
    late = replace(bad, step=9)
    for again in (replace(late, time=10.1, together=True), replace(late, time=12.0)):
        stopped = decide([late], again, RestartPolicy(None), able=True)
        assert stopped.action is RecoveryAction.STOP
        assert stopped.why == "not retrying: the same error in the script or its arguments twice, with no progress"
        assert decide([late], replace(again, step=10), RestartPolicy(None), able=True).action is RecoveryAction.REGROUP


def test_a_complete_training_is_not_repeated_because_its_last_checkpoint_is_missing() -> None:
    unsaved = Fault("CheckpointError", 10.0, HOUR, 4000, retry_chance="over")
    for able, most in ((True, None), (False, 3), (True, 3)):
        stopped = decide([], unsaved, RestartPolicy(most), able=able)
        assert (stopped.action, stopped.why) == (RecoveryAction.STOP, "not retrying: the training is complete")


def test_the_same_exception_twice_before_the_first_step_is_not_retried() -> None:
    raised = Fault("ValueError a.py:3", 10.0, 2.0, None, retry_chance="little", rank=1)
    again = replace(raised, time=10.1, together=True)  # another rank, or another try
    assert decide([], raised, RestartPolicy(None), able=True).action is RecoveryAction.REGROUP
    stopped = decide([raised], again, RestartPolicy(None), able=True)
    assert stopped.action is RecoveryAction.STOP
    assert stopped.why == "not retrying: the same failure on the second try, before the first step was committed"
    stopped = decide([raised], replace(again, rank=0), RestartPolicy(None), able=True)
    assert stopped.why == "not retrying: the same failure on two ranks, before the first step was committed"
    for different in (
        replace(again, place="ValueError a.py:4"),
        replace(again, step=1),
        replace(again, retry_chance="some"),
    ):
        assert decide([raised], different, RestartPolicy(None), able=True).action is RecoveryAction.REGROUP
    # If all ranks are new, they know no step, but the run has committed some.
    killed = Fault("", 5.0, HOUR, 40)
    assert decide([killed, raised], again, RestartPolicy(None), able=True).action is RecoveryAction.REGROUP
    # The steps of a plain script are unknown: it may fail at the same line twice, and still make progress.
    assert decide([raised], again, RestartPolicy(3), able=False).action is RecoveryAction.RESTART


@pytest.mark.parametrize(
    ("apart", "changes", "stops"),
    [
        (3.0, {}, True),
        (TRIES_WINDOW / 8, {}, False),  # ten tries take longer than the window
        (3.0, {"rank": 1}, False),  # not always the same rank
        (3.0, {"place": "OSError train.py:9"}, False),
        (3.0, {"retry_chance": "some"}, False),  # a crash or a kill, not an exception of the script
    ],
)
def test_a_rank_that_raises_at_each_step_ends_the_run_although_others_commit(
    apart: float, changes: dict[str, Any], stops: bool
) -> None:
    tries = [Fault("ValueError train.py:7", apart * n, 2.0, n + 1, retry_chance="little", rank=3) for n in range(TRIES)]
    tries[-2] = replace(tries[-2], **changes)
    if changes.get("retry_chance"):
        tries = [replace(one, **changes) for one in tries]
    assert decide(tries[:-2], tries[-2], RestartPolicy(None), able=True).action is RecoveryAction.REGROUP
    recovery = decide(tries[:-1], tries[-1], RestartPolicy(None), able=True)
    assert (recovery.action is RecoveryAction.STOP) == stops
    if stops:
        assert recovery.why == "not retrying: rank 3 failed 10 times in a row at the same line within 10 minutes"


def test_a_store_that_never_answers_is_started_again_after_a_pause() -> None:
    assert [bool(store_delay(failed)) for failed in range(STORE_STARTS + 2)] == [False] * STORE_STARTS + [True] * 2


def test_a_training_that_has_stopped_itself_is_not_retried() -> None:
    """`--on-nan stop`, even after thousands of steps."""
    fault = Fault("train.py:7", 100.0, 1000.0, step=5000, retry_chance="stopped")
    for able in (True, False):
        found = decide([], fault, RestartPolicy(3), able=able)
        assert (found.action, found.why) == (RecoveryAction.STOP, "not retrying: --on-nan has stopped the training")
