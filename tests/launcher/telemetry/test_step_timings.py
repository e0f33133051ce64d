"""Which ranks are slow, from status slots: only if it matters, and only if it is certain."""

from __future__ import annotations

import random

import pytest

from phalanx.diagnose.rules.stragglers import Total
from phalanx.forkserver.board.status_slot import PHASES, StatusReading
from phalanx.launcher.telemetry import step_timings
from phalanx.launcher.telemetry.step_timings import RankTiming
from phalanx.launcher.workers.worker import Worker
from tests.kit.placements import seat

WORKER = Worker(seat(3, 4, local_rank=1), "")


def reading(step: int, looks: int, phase: str = "forward", **phases: int) -> StatusReading:
    every = {name: phases.get(name, 0) for name in PHASES}
    return StatusReading(step, looks / 10, looks / 10, looks, 0, every, {"phase": phase})


def test_what_comes_before_the_first_steps_and_after_the_last_does_not_count() -> None:
    timing = RankTiming()
    seen = [
        reading(0, 40, "import", **{"import": 40}),
        reading(1, 60, "compile", **{"import": 40}, compile=20),
        reading(2, 70, **{"import": 40}, compile=20, forward=10),
        reading(12, 110, **{"import": 40}, compile=20, forward=30, collective=20),
        reading(12, 500, "idle", **{"import": 40}, compile=20, forward=30, collective=20, idle=390),
    ]
    assert timing.total(WORKER) is None
    for now in seen:
        timing.update(now)
    total = timing.total(WORKER)
    assert total is not None
    assert (total.rank, total.steps, total.samples) == (3, 10, {"forward": 20, "collective": 20})
    assert total.seconds == pytest.approx(4.0)


def test_a_script_without_steps_counts_from_when_it_works_and_again_once_it_has_some() -> None:
    timing = RankTiming()
    for now in (
        reading(0, 10, "join", join=10),
        reading(0, 20, join=10, forward=10),
        reading(0, 30, join=10, forward=20),
    ):
        timing.update(now)
    total = timing.total(WORKER)
    assert total is not None
    assert (total.steps, total.samples) == (0, {"forward": 10})
    timing.update(reading(1, 40, join=10, forward=30))
    assert timing.total(WORKER) is None
    for now in (reading(2, 50, join=10, forward=40), reading(7, 60, join=10, forward=50)):
        timing.update(now)
    total = timing.total(WORKER)
    assert total is not None
    assert (total.steps, total.samples) == (5, {"forward": 10})


def test_a_stall_is_no_usual_step() -> None:
    """A rank that has slept once is not slow. One that becomes slow for good is."""
    timing = RankTiming()
    for now in (reading(2, 20, forward=20), reading(22, 40, forward=40), reading(23, 290, forward=40, idle=250)):
        timing.update(now)
    total = timing.total(WORKER)
    assert total is not None
    assert (total.steps, total.samples, total.seconds) == (20, {"forward": 20}, pytest.approx(2.0))
    timing.update(reading(24, 540, forward=40, idle=500))
    total = timing.total(WORKER)
    assert total is not None
    assert (total.steps, total.samples, total.seconds) == (21, {"forward": 20, "idle": 250}, pytest.approx(27.0))


def test_a_gpu_that_is_slowed_down_now_and_then_is_not_the_reason() -> None:
    timing = RankTiming(reading(2, 0), reading(20, 100, forward=100), gpu_readings=20)
    timing.slowdowns["thermal"] = 2
    total = timing.total(WORKER)
    assert total is not None
    assert total.throttled == ""
    timing.slowdowns["thermal"] = 12
    total = timing.total(WORKER)
    assert total is not None
    assert total.throttled == "thermal"


def looked(dice: random.Random, rank: int, looks: int, computes: float, steps: int = 100) -> Total:
    """Return a rank that was sampled this many times, and computes for this share of its time."""
    found = sum(dice.random() < computes for _ in range(looks))
    return Total(
        rank=rank, samples={"forward": found, "collective": looks - found}, steps=steps, seconds=looks / 10, host="a"
    )


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_equal_ranks_are_not_distinguished_by_noise(ranks: int) -> None:
    dice = random.Random(ranks)
    for _ in range(100):
        looks = dice.choice([30, 60, 200, 1000])
        share = dice.choice([0.1, 0.3, 0.5, 0.9])
        assert step_timings.late([looked(dice, rank, looks, share) for rank in range(ranks)]) == []


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_that_takes_twice_as_long_is_named(ranks: int) -> None:
    dice = random.Random(ranks)
    for _ in range(30):
        totals = [looked(dice, rank, 200, 0.4) for rank in range(ranks - 1)]
        found = step_timings.late([*totals, looked(dice, ranks - 1, 200, 0.9)])
        assert [one.rank for one in found] == [ranks - 1]
        assert found[0].what == "compute"


def test_a_new_rank_is_not_compared() -> None:
    dice = random.Random(0)
    totals = [*(looked(dice, rank, 200, 0.4) for rank in range(2)), looked(dice, 2, 200, 0.95)]
    fresh = Total(rank=3, samples={"forward": 2}, steps=0, seconds=0.2)
    assert [one.rank for one in step_timings.late([*totals, fresh])] == [2]
