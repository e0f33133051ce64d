"""`phalanx bench watch`: what it makes of times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.bench import panorama
from phalanx.bench.fold import measure
from phalanx.bench.looking import CASES, Cost, Seen, Window, computing, costs, target, targets
from phalanx.bench.panorama import Panorama, smooth
from phalanx.bench.watch import main
from phalanx.errors import OptionError
from tests.kit.cli import phalanx


def windows(number: int, off: float, screen: float, page: float) -> list[Window]:
    times = {"off": off, "screen": screen, "page": page, "again": off}
    return [Window("short", number, who, time, 2 * time, 0.003, 0.02, 5000.0) for who, time in times.items()]


def test_a_cost_is_that_of_the_same_round() -> None:
    # The machine was slow in the second round, for all: that is no difference between them.
    found = costs(Seen(CASES["short"], windows(0, 0.001, 0.00101, 0.002) + windows(1, 0.1, 0.101, 0.2)))
    assert {cost.who: cost.more for cost in found} == {"off": 0.0, "screen": 0.01, "page": 1.0, "again": 0.0}
    assert found[1].milliseconds == 51.005
    assert (found[1].computing, found[1].agent, found[1].onlooker, found[1].sent) == (0.01, 0.003, 0.02, 5000)


def test_who_never_looked_has_a_reason() -> None:
    alone = [window for window in windows(0, 0.001, 0.001, 0.001) if window.who == "off"]
    found = {cost.who: cost.failure for cost in costs(Seen(CASES["short"], alone, failure="it has ended"))}
    assert found == {"off": "it has ended", "screen": "it has ended", "page": "it has ended", "again": "it has ended"}


@pytest.mark.parametrize(
    ("more", "error", "again", "met", "evidence"),
    [
        (0.008, 0.001, 0.0, True, "+0.80% ± 0.10%"),
        (0.02, 0.001, 0.0, False, "+2.00% ± 0.10%"),
        (0.001, 0.06, 0.0, None, "too busy to tell"),
        (0.2, 0.06, 0.0, False, "+20.00%"),  # whatever the error
        (0.001, 0.001, -0.03, None, "nobody, again, is -3.00%"),
    ],
)
def test_the_promise(more: float, error: float, again: float, met: bool | None, evidence: str) -> None:
    judged = target(Cost("short", 2, "page", 1.0, more, error), Cost("short", 2, "again", 1.0, again))
    assert judged.met is met
    assert evidence in judged.evidence


def test_what_the_kernel_has_counted_is_certain() -> None:
    off = Cost("short", 2, "off", agent=0.004)
    screen = Cost("short", 2, "screen", agent=0.005, onlooker=0.012)
    judged = computing(screen, off, cores=2)
    assert judged.met
    assert judged.evidence == "0.65% (screen 1.20% of a core, agent +0.10%)"
    assert computing(screen, off, cores=1).met is False
    assert computing(Cost("short", 2, "page", failure="it has ended"), off, cores=2).met is None
    assert [judged.met for judged in targets([off, screen], cores=2)] == [True, True]


def test_a_frame_that_takes_two_turns_has_missed_one() -> None:
    assert smooth([1 / 60] * 10) == 1.0
    assert smooth([0.0165, 0.0168, 0.0333]) == 0.75
    assert smooth([]) == 0.0


def test_a_page_is_judged_by_medians() -> None:
    fast = Panorama(512, 0.4, (0.02, 0.03), (1 / 60,) * 60, 4000, (1 / 60,) * 60)
    slow = Panorama(512, 1.8, (0.2,), (1 / 60,) * 60, 4000, (1 / 60,) * 60)
    assert [judged.met for judged in panorama.targets([fast, slow, fast])] == [True, True, True]
    assert [judged.met for judged in panorama.targets([slow])] == [False, False, True]
    rough = Panorama(512, 0.4, (), (1 / 30,) * 60, 4000, (1 / 60,) * 60)
    assert [judged.met for judged in panorama.targets([rough])] == [True, None, False]
    busy = Panorama(512, 0.4, (), (1 / 30,) * 60, 4000, (1 / 30,) * 60)  # an empty page misses frames as well
    assert panorama.targets([busy])[2].met is None
    none = panorama.targets([Panorama(512, failure="there is no Chromium here")])
    assert [(judged.met, judged.evidence) for judged in none] == [(None, "there is no Chromium here")] * 3


def test_a_second_of_events_is_folded() -> None:
    few, many = measure(2, seconds=3), measure(64, seconds=3)
    assert 0 < few.line < many.line
    assert min(many.publish, many.read, many.see) > 0


def test_too_little() -> None:
    with pytest.raises(OptionError):
        main(["--rounds", "0"], {})
    with pytest.raises(OptionError, match="none of"):
        main(["--cases", "never"], {})


def test_a_small_real_one(tmp_path: Path) -> None:
    """One window each, and a page of few ranks: no figure is good for anything, but all of them are there."""
    file = tmp_path / "result.json"
    small = ("--cases", "one", "--rounds", "1", "--seconds", "0.5", "--settle", "0.1", "--ranks", "24", "--times", "1")
    result = phalanx("bench", "watch", *small, "--json", str(file), timeout=150)
    data = json.loads(file.read_text())
    (seen,) = data["seen"]
    assert seen["opened"] > 0, result.err
    assert {window["who"] for window in seen["windows"]} == {"off", "screen", "page", "again"}, result.err
    assert not any(cost["failure"] for cost in data["costs"]), result.err
    # Somebody has looked, or it would have failed; in so short a time there may be nothing new to be seen.
    busy = {cost["who"]: cost["onlooker"] for cost in data["costs"]}
    assert busy["off"] == busy["again"] == 0
    page = data["pages"][0]
    assert page["failure"] == ""
    assert page["paint"] > 0
    assert len(page["frames"]) > 1
    assert [fold["ranks"] for fold in data["folds"]] == [8, 24]
    assert len(data["targets"]) == 7
    assert "24 ranks" in result.out
