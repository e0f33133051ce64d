"""Letters on the time axis."""

from __future__ import annotations

import pytest

from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.series import strip as strips
from phalanx.watch.model.series.strip import MOST, Strip

ADDED = {
    "one after the other": ([(10.0, "ddddd"), (10.5, "fffff")], "dddddfffff"),
    "a sampler that is a little late": ([(10.0, "ddddd"), (10.7, "fffff")], "dddddfffffff"),
    "and a little early": ([(10.0, "ddddd"), (10.3, "fffff")], "dddddfff"),
    "no step gets lost": ([(10.0, "ddddd"), (10.3, "fFfff")], "dddddFff"),
    "where nobody looked": ([(10.0, "ddddd"), (11.5, "fffff")], "ddddd..........fffff"),
    "nothing came": ([(10.0, "ddddd"), (10.5, "")], "ddddd....."),
    "twice the same": ([(10.0, "ddddd"), (10.0, "ddddd")], "ddddd"),
    "an old one": ([(10.0, "ddddd"), (9.0, "fffff")], "ddddd"),
    "the clock was set back": ([(1000.0, "ddddd"), (10.0, "fffff")], "fffff"),
}


@pytest.mark.parametrize("name", ADDED)
def test_letters_are_appended(name: str) -> None:
    given, letters = ADDED[name]
    strip = Strip()
    for when, more in given:
        strip.add(when, more)
    assert strip.letters == letters


def test_letters_stay_where_they_were_however_the_sampler_drifts() -> None:
    strip = Strip()
    for second in range(1, 500):
        strip.add(1000 + second * 1.04, ("d" if second % 2 else "f") * 10)
    assert strip.start == pytest.approx(1000.0, abs=0.2)
    assert strip.between(1000 + 100 * 1.04 + 0.2, 1000 + 101 * 1.04 - 0.2).strip("d") == ""
    assert "." not in strip.letters


def test_it_is_never_longer_than_its_bound() -> None:
    strip = Strip()
    strip.add(10, "d" * 2 * MOST)
    strip.add(1e9, "f" * 10)
    assert len(strip.letters) == MOST


def test_strips_of_many_ranks_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they take 200 MB for 32,768 ranks, which every sample copies."""
    assert [strips.room(ranks) for ranks in (0, 1, 1000, 2000, 32_768)] == [6000, 6000, 6000, 3000, 300]
    monkeypatch.setattr(strips, "_ALL", 4 * 320)
    model = RunModel()
    for event in simulation.run(4, 70):
        model.apply(event)
    assert {len(view.activity.strip.letters) for view in model.ranks.values()} == {320}


@pytest.mark.parametrize(
    ("start", "end", "letters"),
    [
        (9.0, 10.0, "abcdefghij"),
        (9.5, 9.7, "fg"),
        (8.8, 9.2, "..ab"),
        (9.8, 10.4, "ij"),
        (1.0, 1.3, "..."),
        (20, 21, ""),
    ],
)
def test_between(start: float, end: float, letters: str) -> None:
    strip = Strip()
    strip.add(10.0, "abcdefghij")
    assert strip.between(start, end) == letters
