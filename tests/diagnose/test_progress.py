"""When an alarm is raised and when not, over simulated seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from phalanx.diagnose.progress import AGAIN, Alarm, ProgressWatch, Reading

Script = Callable[[int], Sequence[Reading]]


def alarms(script: Script, seconds: int, stall_timeout: float = 30.0) -> Iterator[tuple[int, Alarm]]:
    watch = ProgressWatch(stall_timeout)
    for second in range(seconds):
        alarm = watch.see(script(second))
        if alarm is not None:
            yield second, alarm


def going(number: int, second: int, until: int = 10**6, **more: Any) -> Reading:
    """Return a reading with ten collectives and one step per second, until `until`."""
    done = min(second, until)
    more = {"usual": 1.0, **more}
    return Reading(number, float(second), step=done, progress=done * 10, **more)


def stuck_at(after: int, *, culprit: dict[str, Any], size: int = 4, **everybody: Any) -> Script:
    """All ranks make progress until `after`. Then rank 2 does what `culprit` says, and the others wait."""

    def script(second: int) -> list[Reading]:
        if second <= after:
            return [going(number, second, **everybody) for number in range(size)]
        others = [going(number, second, after, waiting=True, **everybody) for number in range(size) if number != 2]
        return [*others, going(2, second, after, **{**everybody, **culprit})]

    return script


def imports_first(second: int) -> list[Reading]:
    """Two ranks import for 25 seconds, and then wait for each other."""
    phase, waits = ("import", False) if second < 25 else ("join", True)
    return [Reading(number, float(second), phase=phase, waiting=waits) for number in range(2)]


def first_step(**more: Any) -> Script:
    def script(second: int) -> list[Reading]:
        return [Reading(0, float(second), **more), Reading(1, float(second), waiting=True)]

    return script


HEALTHY: dict[str, tuple[Script, int]] = {
    "progresses": (lambda second: [going(number, second) for number in range(4)], 400),
    "nobody is there": (lambda second: [], 400),
    "slow steps": (
        lambda second: [
            Reading(number, float(second), step=second // 60, progress=1, usual=60.0) for number in range(4)
        ],
        1000,
    ),
    "a step that takes four times as long": (stuck_at(10, culprit={"state": "S"}, usual=20.0), 100),
    "a long first step": (first_step(phase="forward", state="R"), 299),
    "a long first step, at one place": (first_step(phase="data"), 299),
    "a long first step after the model was broadcast": (first_step(progress=9, state="R"), 299),
    "a long first step of all": (
        lambda second: [Reading(number, float(second), progress=9, phase="forward") for number in range(4)],
        299,
    ),
    "evaluation on one rank": (stuck_at(10, culprit={"busy": True, "state": "R"}), 300),
    "a checkpoint": (stuck_at(10, culprit={"phase": "checkpoint", "state": "D"}), 300),
    "compiling": (stuck_at(10, culprit={"phase": "compile", "state": "R"}), 300),
    "compiling in native code that holds the GIL": (
        lambda second: [
            going(0, second, 10, phase="compile", state="R", silent=max(0.0, second - 10.0)),
            going(1, second, 10, waiting=second > 10),
        ],
        300,
    ),
    "all wait after a long import": (imports_first, 54),
    "importing": (stuck_at(10, culprit={"phase": "import", "state": "R"}), 300),
    "a debugger is open": (stuck_at(10, culprit={"debugged": True}), 2000),
    "a debugger, in another rank than the one that waits": (
        lambda second: [going(number, second, 10, waiting=True, debugged=number == 3) for number in range(4)],
        2000,
    ),
    "computes now and then": (
        lambda second: [
            going(0, second, 10, busy=second % 20 == 0, state="R"),
            *(going(number, second, 10, waiting=second > 10) for number in (1, 2, 3)),
        ],
        300,
    ),
    "alone, without any steps": (lambda second: [Reading(number, float(second)) for number in range(2)], 4000),
    "alone, and its steps stop while it computes": (
        lambda second: [Reading(0, float(second), step=min(second, 50), usual=1.0, state="R")],
        4000,
    ),
    "alone, and its steps stop while it compiles": (
        lambda second: [Reading(0, float(second), step=min(second, 50), usual=1.0, phase="compile")],
        4000,
    ),
    "all wait for less than the limit": (
        lambda second: [going(number, second // 25 * 25, waiting=second % 25 > 0, usual=25.0) for number in range(4)],
        300,
    ),
    "a parameter server, while others train": (
        lambda second: [*(going(number, second, waiting=second % 2 > 0) for number in range(3)), Reading(3, second)],
        4000,
    ),
    "inference after the model was broadcast": (
        lambda second: [
            Reading(number, float(second), progress=9, busy=True, state="RS"[second % 2]) for number in range(2)
        ],
        4000,
    ),
    "a long evaluation by all": (
        lambda second: [going(number, second, 50, busy=second > 50, state="R") for number in range(2)],
        4000,
    ),
    "an evaluation that waits for its data": (
        lambda second: [going(number, second, 50, phase="data", batches=second // 20) for number in range(2)],
        4000,
    ),
    "a file is read in native code before the first step": (
        lambda second: [Reading(0, float(second), silent=float(second), state="R")],
        4000,
    ),
    "the same, and another one waits for it": (
        lambda second: [
            Reading(0, float(second), silent=float(second), state="R"),
            Reading(1, float(second), waiting=True),
        ],
        299,
    ),
    "it was we who were stopped": (
        lambda second: [
            going(0, second + (500 if second > 20 else 0), 10, waiting=True),
            going(1, second + (500 if second > 20 else 0), 10, silent=500.0 if second > 20 else 0.0),
        ],
        40,
    ),
    "one has ended": (
        lambda second: [going(0, second, 10, state="Z"), *(going(number, second) for number in (1, 2))],
        300,
    ),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_no_alarm(case: str) -> None:
    script, seconds = HEALTHY[case]
    assert list(alarms(script, seconds)) == []


STALLS: dict[str, tuple[Script, int, tuple[int, ...], bool]] = {
    "one stands": (stuck_at(10, culprit={}), 40, (2,), False),
    "one stands, steps are slow": (stuck_at(10, culprit={}, usual=20.0), 110, (2,), False),
    "one stands, steps cannot be seen": (
        lambda second: [
            Reading(number, float(second), progress=min(second, 10), waiting=number > 0) for number in range(3)
        ],
        40,
        (0,),
        False,
    ),
    "one is in data loading": (stuck_at(10, culprit={"phase": "data"}), 40, (2,), False),
    "one is stopped": (stuck_at(10, culprit={"state": "T", "busy": True}), 40, (2,), True),
    "one is stopped, steps are slow": (stuck_at(10, culprit={"state": "T"}, usual=20.0), 40, (2,), True),
    "one holds the GIL": (
        lambda second: [
            going(0, second, 10, waiting=True, state="R", silent=max(0.0, second - 10.0)),
            going(1, second, 10, waiting=second > 10),
        ],
        40,
        (0,),
        True,
    ),
    "all wait": (stuck_at(10, culprit={"waiting": True}), 40, (0, 1, 2, 3), True),
    "one whose node does not report any more": (
        lambda second: [
            going(0, second, 10, waiting=second > 10),
            going(1, min(second, 12), 10, waiting=second > 10),
        ],
        40,
        (0, 1),
        True,
    ),
    "all wait in their first": (
        lambda second: [Reading(number, float(second), waiting=True) for number in range(2)],
        30,
        (0, 1),
        True,
    ),
    "all wait for ever after a long import": (imports_first, 54, (0, 1), True),
    "an endless loop": (stuck_at(10, culprit={"busy": True, "state": "R"}), 310, (2,), False),
    "a checkpoint that never ends": (stuck_at(10, culprit={"phase": "checkpoint"}), 310, (2,), False),
    "a first step that never ends": (first_step(state="R", busy=True), 300, (0,), False),
    "computed, and then stands": (
        lambda second: [
            going(0, second, 10, busy=10 < second < 60, state="R"),
            *(going(number, second, 10, waiting=second > 10) for number in (1, 2, 3)),
        ],
        89,
        (0,),
        False,
    ),
    "alone, and its steps stop": (
        lambda second: [
            Reading(0, float(second), step=min(second, 50), usual=1.0),
            Reading(1, float(second), step=second, usual=1.0),
        ],
        80,
        (0,),
        False,
    ),
    "a first step of all that rests": (
        lambda second: [Reading(number, float(second), progress=9, phase="data") for number in range(2)],
        300,
        (0, 1),
        False,
    ),
    "two that wait for each other while the rest progresses": (
        lambda second: [
            *(going(number, second, 10, waiting=second > 10) for number in (0, 1)),
            *(going(number, second) for number in (2, 3)),
        ],
        310,
        (0, 1),
        False,
    ),
}


@pytest.mark.parametrize("case", STALLS)
def test_alarm(case: str) -> None:
    script, when, ranks, proven = STALLS[case]
    [(second, alarm)] = list(alarms(script, when + 60))
    assert (second, alarm.what, alarm.ranks, alarm.proven) == (when, "stall", ranks, proven)
    assert second - alarm.since >= min(alarm.limit, 30.0)


def test_limit_is_the_users() -> None:
    script = stuck_at(10, culprit={}, usual=0.1)
    assert [second for second, _ in alarms(script, 60, stall_timeout=5.0)] == [15]


def test_reported_again_after_ten_minutes_and_when_it_ends() -> None:
    end = 10 + 30 + 2 * int(AGAIN) + 100

    def script(second: int) -> list[Reading]:
        if second >= end:
            return [going(number, second) for number in range(4)]
        return stuck_at(10, culprit={})(second)

    raised = [(second, alarm.what) for second, alarm in alarms(script, end + 100)]
    assert raised == [(40, "stall"), (640, "again"), (1240, "again"), (end, "resumed")]


def test_second_stall_is_another_alarm() -> None:
    def script(second: int) -> list[Reading]:
        step = min(second, 10) if second < 60 else min(second, 70)
        return [Reading(number, float(second), step=step, waiting=number > 0, usual=1.0) for number in range(2)]

    assert [(second, alarm.what) for second, alarm in alarms(script, 120)] == [
        (40, "stall"),
        (60, "resumed"),
        (100, "stall"),
    ]


def test_rank_that_is_replaced_ends_the_stall() -> None:
    def script(second: int) -> list[Reading]:
        if second < 60:
            return stuck_at(10, culprit={})(second)
        if second < 62:
            return [going(number, second, 10, waiting=True) for number in (0, 1, 3)]
        return [Reading(number, float(second), step=second - 50, progress=second, usual=1.0) for number in range(4)]

    assert [(second, alarm.what) for second, alarm in alarms(script, 120)] == [(40, "stall"), (60, "resumed")]


def test_time_in_a_debugger_does_not_count() -> None:
    def script(second: int) -> list[Reading]:
        return [going(number, second, 10, waiting=second > 10, debugged=10 < second < 500) for number in range(2)]

    assert [second for second, _ in alarms(script, 560)] == [529]


def test_a_look_by_a_debugger_does_not_end_a_stall() -> None:
    def script(second: int) -> list[Reading]:
        return [going(number, second, 10, waiting=second > 10, debugged=60 < second < 90) for number in range(2)]

    assert [(second, alarm.what) for second, alarm in alarms(script, 200)] == [(40, "stall")]


def test_a_blocked_rank_continues_while_another_stays_idle() -> None:
    def script(second: int) -> list[Reading]:
        server = Reading(2, float(second))
        busy = going(0, second, 10 if second < 400 else 10**6, busy=10 < second < 400, state="R")
        kept = going(1, second, 10 if second < 400 else 10**6, waiting=10 < second < 400)
        return [busy, kept, server]

    assert [(second, alarm.what, alarm.ranks) for second, alarm in alarms(script, 2000)] == [
        (300, "stall", (2,)),
        (400, "resumed", (2,)),
    ]


def test_a_rank_that_ends_does_not_end_a_stall_of_others() -> None:
    def script(second: int) -> list[Reading]:
        ended = [] if second > 60 else [going(4, second)]
        return [*stuck_at(10, culprit={})(second), *ended]

    assert [(second, alarm.what) for second, alarm in alarms(script, 200)] == [(40, "stall")]
