"""Who waits for whom."""

from __future__ import annotations

import pytest

from phalanx.watch.model.strip import Strip
from phalanx.watch.model.waiting import Tally, WaitedFor, held, stretches


def strips(*letters: str, end: float = 10.0) -> dict[int, Strip]:
    made = {rank: Strip() for rank in range(len(letters))}
    for rank, each in enumerate(letters):
        made[rank].add(end, each)
    return made


def _found(*letters: str) -> list[tuple[float, float, tuple[int, ...], tuple[int, ...]]]:
    return [
        (round(one.start, 1), round(one.end, 1), one.waiting, one.on) for one in stretches(strips(*letters), 9.0, 10.0)
    ]


TABLE = {
    "nobody waits": (("ffffffffff", "ffffffffff"), []),
    "all wait": (("wwwwwwwwww", "wwwwwwwwww"), []),
    "one is late": (("fwwwwwffff", "ffffwwffff"), [(9.1, 9.4, (0,), (1,))]),
    "most are late": (("fwwwwwffff", "ffffwwffff", "ffffwwffff"), []),
    "one after the other": (
        ("wwwwwwffff", "dddwwwffff", "wwwwddffff"),
        [(9.0, 9.3, (0, 2), (1,)), (9.4, 9.6, (0, 1), (2,))],
    ),
    "nobody looks at one": (("wwwwwwwwww", "..........", "dddddddddd"), [(9.0, 10.0, (0,), (2,))]),
    "steps end": (("WWwwwwffff", "DDDDwwffff"), [(9.0, 9.4, (0,), (1,))]),
    "it starts again": (("wwfwwfffff", "ddfddfffff"), [(9.0, 9.2, (0,), (1,)), (9.3, 9.5, (0,), (1,))]),
}


@pytest.mark.parametrize("name", TABLE)
def test_stretches(name: str) -> None:
    letters, found = TABLE[name]
    assert _found(*letters) == found


def test_nothing_at_all() -> None:
    assert stretches({}, 0, 10) == []
    assert held({}, 0, 10) == []
    assert Tally().held() == []


def test_how_long_each_was_waited_for() -> None:
    found = held(strips("wwwwwwwwwO", "ddddwwwwwO", "wwwwwwfwwO"), 9.0, 10.0)
    assert found == [
        WaitedFor(1, 0.4, 0.4, "data", steps=1),
        WaitedFor(2, 0.1, 0.1, "forward", steps=1),
    ]
    assert found[0].each == pytest.approx(0.4)
    assert found[0].sentence() == "rank 1 kept the others waiting 40% of the last minute, mostly in data loading"


def test_the_tally_of_a_minute_is_what_the_strips_say() -> None:
    made, tally = strips("", "", ""), Tally()
    for second in range(200):
        letters = ("w" * 10, "ddd" + "w" * 7 if second > 120 else "w" * 10, "wwwwwwwf" + "ww")
        for rank, each in enumerate(letters):
            made[rank].add(1000.0 + second, each)
        tally.see(1000.0 + second, dict(enumerate(letters)))
    expected = [(one.rank, one.seconds, one.phase) for one in held(made, 1199.0 - 60, 1199.0)]
    assert [(one.rank, one.seconds, one.phase) for one in tally.held()] == expected
    assert tally.seconds == 60
    assert tally.slow == {1}


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
    tally = Tally()
    for second in range(seconds):
        tally.see(float(second), {0: one * 2, 1: other * 2})
    assert tally.slow == slow


def test_who_is_slow_no_more() -> None:
    tally = Tally()
    for second in range(60):
        tally.see(float(second), {0: "w" * 10, 1: "d" * 5 + "w" * 5})
    for second in range(60, 130):
        tally.see(float(second), {0: "w" * 10, 1: "w" * 10})
    assert (tally.slow, tally.held()) == (set(), [])
