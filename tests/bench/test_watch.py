"""`phalanx bench watch`: how it evaluates times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.watch import page as page_benchmark
from benchmarks.watch.benchmark import main
from benchmarks.watch.model_update import measure
from benchmarks.watch.overhead import (
    CASES,
    ViewerCost,
    WatchResult,
    WatchWindow,
    costs,
    cpu_target,
    target,
    targets,
)
from benchmarks.watch.page import PageSample, frames_on_time
from phalanx.errors import OptionError
from tests.kit.cli import phalanx


def windows(number: int, off: float, screen: float, page: float) -> list[WatchWindow]:
    times = {"off": off, "screen": screen, "page": page, "again": off}
    return [WatchWindow("short", number, viewer, time, 2 * time, 0.003, 0.02, 5000.0) for viewer, time in times.items()]


def test_a_cost_is_that_of_the_same_round() -> None:
    # The machine was slow in the second round, for all. That is not a difference between them.
    found = costs(WatchResult(CASES["short"], windows(0, 0.001, 0.00101, 0.002) + windows(1, 0.1, 0.101, 0.2)))
    assert {cost.viewer: cost.more for cost in found} == {"off": 0.0, "screen": 0.01, "page": 1.0, "again": 0.0}
    assert found[1].milliseconds == 51.005
    assert (found[1].computing, found[1].agent, found[1].viewer_cpu, found[1].sent) == (0.01, 0.003, 0.02, 5000)


def test_who_never_looked_has_a_reason() -> None:
    alone = [window for window in windows(0, 0.001, 0.001, 0.001) if window.viewer == "off"]
    found = {cost.viewer: cost.failure for cost in costs(WatchResult(CASES["short"], alone, failure="it has ended"))}
    assert found == {"off": "it has ended", "screen": "it has ended", "page": "it has ended", "again": "it has ended"}


@pytest.mark.parametrize(
    ("more", "error", "again", "met", "evidence"),
    [
        (0.008, 0.001, 0.0, True, "+0.80% ± 0.10%"),
        (0.02, 0.001, 0.0, False, "+2.00% ± 0.10%"),
        (0.001, 0.06, 0.0, None, "Too much noise to tell"),
        (0.2, 0.06, 0.0, False, "+20.00%"),  # no matter how large the error is
        (0.001, 0.001, -0.03, None, "without a viewer differ by -3.00%"),
    ],
)
def test_the_promise(more: float, error: float, again: float, met: bool | None, evidence: str) -> None:
    judged = target(ViewerCost("short", 2, "page", 1.0, more, error), ViewerCost("short", 2, "again", 1.0, again))
    assert judged.met is met
    assert evidence in judged.evidence


def test_what_the_kernel_has_counted_is_certain() -> None:
    off = ViewerCost("short", 2, "off", agent=0.004)
    screen = ViewerCost("short", 2, "screen", agent=0.005, viewer_cpu=0.012)
    judged = cpu_target(screen, off, cores=2)
    assert judged.met
    assert judged.evidence == "0.65% (screen 1.20% of a core, agent +0.10%)"
    assert cpu_target(screen, off, cores=1).met is False
    assert cpu_target(ViewerCost("short", 2, "page", failure="it has ended"), off, cores=2).met is None
    assert [judged.met for judged in targets([off, screen], cores=2)] == [True, True]


def test_a_frame_that_takes_two_turns_has_missed_one() -> None:
    assert frames_on_time([1 / 60] * 10) == 1.0
    assert frames_on_time([0.0165, 0.0168, 0.0333]) == 0.75
    assert frames_on_time([]) == 0.0


def test_a_page_is_judged_by_medians() -> None:
    fast = PageSample(512, 0.4, (0.02, 0.03), (1 / 60,) * 60, 4000, (1 / 60,) * 60)
    slow = PageSample(512, 1.8, (0.2,), (1 / 60,) * 60, 4000, (1 / 60,) * 60)
    assert [judged.met for judged in page_benchmark.targets([fast, slow, fast])] == [True, True, True]
    assert [judged.met for judged in page_benchmark.targets([slow])] == [False, False, True]
    rough = PageSample(512, 0.4, (), (1 / 30,) * 60, 4000, (1 / 60,) * 60)
    assert [judged.met for judged in page_benchmark.targets([rough])] == [True, None, False]
    busy = PageSample(512, 0.4, (), (1 / 30,) * 60, 4000, (1 / 30,) * 60)  # an empty page also misses frames
    assert page_benchmark.targets([busy])[2].met is None
    none = page_benchmark.targets([PageSample(512, failure="Chromium is not installed")])
    assert [(judged.met, judged.evidence) for judged in none] == [(None, "Chromium is not installed")] * 3


def test_a_second_of_events() -> None:
    few, many = measure(2, seconds=3), measure(64, seconds=3)
    assert 0 < few.line < many.line
    assert min(many.publish, many.read, many.apply) > 0


def test_too_little() -> None:
    with pytest.raises(OptionError):
        main(["--rounds", "0"], {})
    with pytest.raises(OptionError, match="none of"):
        main(["--cases", "never"], {})


@pytest.mark.extended
def test_a_small_real_one(tmp_path: Path) -> None:
    """One window each, and a page with few ranks: the figures are meaningless, but all of them exist."""
    file = tmp_path / "result.json"
    small = ("--cases", "one", "--rounds", "1", "--seconds", "0.5", "--settle", "0.1", "--ranks", "24", "--times", "1")
    result = phalanx("bench", "watch", *small, "--json", str(file), timeout=150)
    data = json.loads(file.read_text())
    (seen,) = data["cases"]
    assert seen["opened"] > 0, result.err
    assert {window["viewer"] for window in seen["windows"]} == {"off", "screen", "page", "again"}, result.err
    assert not any(cost["failure"] for cost in data["costs"]), result.err
    # A viewer was connected, otherwise it would have failed. In so short a time it may have received nothing new.
    busy = {cost["viewer"]: cost["viewer_cpu"] for cost in data["costs"]}
    assert busy["off"] == busy["again"] == 0
    page = data["pages"][0]
    assert page["failure"] == ""
    assert page["paint"] > 0
    assert len(page["frames"]) > 1
    assert [one["ranks"] for one in data["updates"]] == [8, 24]
    assert len(data["targets"]) == 7
    assert "24 ranks" in result.out
