"""Which ranks keep the others waiting."""

from __future__ import annotations

import pytest

from phalanx.watch.model.waiting import WaitedFor, WaitingTally

TABLE = {
    "nobody waits": (("ffffffffff", "ffffffffff"), {}),
    "all wait": (("wwwwwwwwww", "wwwwwwwwww"), {}),
    "one is late": (("fwwwwwffff", "ffffwwffff"), {1: 0.3}),
    "most are late": (("fwwwwwffff", "ffffwwffff", "ffffwwffff"), {}),
    "one after the other": (("wwwwwwffff", "dddwwwffff", "wwwwddffff"), {1: 0.3, 2: 0.2}),
    "one is not sampled": (("wwwwwwwwww", "..........", "dddddddddd"), {2: 1.0}),
    "steps end": (("WWwwwwffff", "DDDDwwffff"), {1: 0.4}),
    "twice": (("wwfwwfffff", "ddfddfffff"), {1: 0.4}),
    "fewer letters": (("wwww", "wwwwwwdddd"), {1: 0.4}),
    "nothing at all": ((), {}),
}


@pytest.mark.parametrize("name", TABLE)
def test_who_is_waited_for(name: str) -> None:
    letters, seconds = TABLE[name]
    tally = WaitingTally()
    tally.record(10.0, dict(enumerate(letters)))
    assert {one.rank: one.seconds for one in tally.ranking()} == seconds


def test_the_waiting_time_caused_by_each_rank() -> None:
    tally = WaitingTally()
    tally.record(10.0, {0: "wwwwwwwwwO", 1: "ddddwwwwwO", 2: "wwwwwwfwwO"})
    found = tally.ranking()
    assert found == [WaitedFor(1, 0.4, 0.4, "data"), WaitedFor(2, 0.1, 0.1, "forward")]
    assert found[0].sentence() == "rank 1 kept the others waiting 40% of the last minute, mostly in data loading"


def test_the_tally_is_of_the_last_minute() -> None:
    tally = WaitingTally()
    for second in range(200):
        letters = ("w" * 10, "ddd" + "w" * 7 if second >= 170 else "w" * 10, "wwwwwwwf" + "ww")
        tally.record(1000.0 + second, dict(enumerate(letters)))
    assert [(one.rank, one.seconds, one.phase) for one in tally.ranking()] == [(1, 9.0, "data"), (2, 6.0, "forward")]
    assert tally.seconds == 60


SLOW = {
    "always late": ("wwwww", "ddwww", 30, {1}),
    "not long enough": ("wwwww", "ddwww", 10, set()),
    "both by turns": ("wwwdd", "ddwww", 60, set()),
    "writes a checkpoint": ("wwwww", "kkkkw", 60, set()),
    "compiles": ("wwwww", "ccccw", 60, set()),
}


@pytest.mark.parametrize("name", SLOW)
def test_who_is_slow(name: str) -> None:
    one, other, seconds, slow = SLOW[name]
    tally = WaitingTally()
    for second in range(seconds):
        tally.record(float(second), {0: one * 2, 1: other * 2})
    assert tally.slow == slow


def test_who_is_no_longer_slow() -> None:
    tally = WaitingTally()
    for second in range(60):
        tally.record(float(second), {0: "w" * 10, 1: "d" * 5 + "w" * 5})
    for second in range(60, 130):
        tally.record(float(second), {0: "w" * 10, 1: "w" * 10})
    assert (tally.slow, tally.ranking()) == (set(), [])
