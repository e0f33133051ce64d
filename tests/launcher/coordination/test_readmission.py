"""How long a dismissed host waits: a table without clocks."""

from __future__ import annotations

from phalanx.launcher.coordination.leader.readmission import FIRST_DELAY, LONGEST_DELAY, Readmission


def test_each_dismissal_doubles_the_wait() -> None:
    readmission = Readmission()
    assert readmission.remaining("one", 0.0) == 0.0
    now, waits = 100.0, []
    for _ in range(9):
        readmission.dismissed("one", now, "another model")
        waits.append(readmission.remaining("one", now))
        now += waits[-1]
        assert readmission.remaining("one", now) == 0.0
    assert waits[:4] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY]
    assert waits[-1] == LONGEST_DELAY
    assert readmission.note("one", now) == "this host was dismissed before: another model"
    assert readmission.note("two", now) == ""
    assert readmission.remaining("two", now) == 0.0


def test_the_wait_counts_from_the_latest() -> None:
    readmission = Readmission()
    readmission.dismissed("one", 100.0, "first")
    readmission.dismissed("one", 104.0, "second")
    assert readmission.remaining("one", 110.0) == 14.0
    assert readmission.note("one", 110.0).endswith(": second; it gets ranks in 14 s at the earliest")
