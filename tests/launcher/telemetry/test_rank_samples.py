"""The samples of one rank: phases, shares of time, steps and samples per second."""

from __future__ import annotations

import itertools

import pytest

from phalanx.contract.events import UNSEEN
from phalanx.forkserver.board.status_slot import PHASES, SlotLook
from phalanx.launcher.telemetry import rank_samples
from phalanx.launcher.telemetry.metrics import Downsampler
from phalanx.launcher.workers.worker import Worker
from tests.kit.placements import seat
from tests.launcher.telemetry.looks import WALL, look


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([], "....."),
        ([look(0, "data"), look(1, "forward"), look(2, "backward"), look(3, "collective"), look(4, "idle")], "dfbwn"),
        ([look(0.2, "data"), look(1.4, "forward"), look(3.1, "backward")], "dffbb"),  # a little late
        ([look(0, "data"), look(4.9, "forward")], "ddd.f"),  # too late
        ([look(1, "data", 3), look(2, "optimizer", 4), look(3, "data", 4), look(4, "data", 6)], ".dOdD"),
        ([look(1, "optimizer", 3), look(1.5, "optimizer", 4), look(1.9, "data", 4)], ".Dddd"),
    ],
    ids=range(6),
)
def test_one_phase_letter_per_tenth_of_a_second(looks: list[SlotLook], expected: str) -> None:
    first = int(WALL * 10)
    assert rank_samples.letters(looks, first, first + 5, WALL) == expected


def test_phases_continue_from_the_second_before() -> None:
    looks = [look(tenths + 0.3, PHASES[tenths % 7 + 2], tenths // 3) for tenths in range(40)]
    whole = rank_samples.letters(looks, 0, 40, 0.0)
    parts, before = "", None
    for second in range(4):
        now = [one for one in looks if second <= one.time < second + 1]
        parts += rank_samples.letters(now, second * 10, second * 10 + 10, 0.0, before)
        before = now[-1]
    assert parts == whole
    assert UNSEEN not in whole
    assert sum(letter.isupper() for letter in whole) == 13


def test_shares_count_the_looks_of_each_kind() -> None:
    assert rank_samples.shares([]) == (0.0, 0.0, 0.0)
    seen = ["data", "forward", "backward", "idle", "collective", "join", "compile", "checkpoint", "data", "optimizer"]
    assert rank_samples.shares([look(0, phase) for phase in seen]) == (0.2, 0.4, 0.2)


def test_a_rank_that_sleeps_does_not_compute() -> None:
    assert rank_samples.shares([look(0, phase) for phase in ("sleep", "sleep", "sleep", "idle")]) == (0.0, 0.25, 0.0)
    own = [look(0, phase) for phase in ("forward", "idle", "idle", "idle", "data")]
    assert rank_samples.shares(own, 0.5) == (0.2, 0.3, 0.0)  # it sleeps for milliseconds in between
    assert rank_samples.shares(own, 3.0) == (0.2, 0.8, 0.0)


def test_samples_per_second_cover_the_last_seconds() -> None:
    worker, seen = Worker(seat(), ""), rank_samples._WorkerHistory()
    assert seen.rate(worker) == -1
    found = []
    for second in range(20):
        worker.progress.samples, worker.progress.sampled = 100 * second + 50 * max(0, second - 10), float(second)
        found.append(seen.rate(worker))
    assert found[:11] == [-1.0, *[100.0] * 10]
    assert found[-1] == 150.0
    worker.progress.samples, worker.progress.sampled = 10, 20.5  # it was restarted
    assert seen.rate(worker) == -1


def test_steps_follow_the_status_slot() -> None:
    worker, seen = Worker(seat(), ""), rank_samples._WorkerHistory()
    assert [seen.steps(worker, paged) for paged in (0, 7)] == [-1, 7]
    worker.progress.step, worker.progress.slot_step, worker.progress.steps_match = 1000, 100, True
    assert seen.steps(worker, 103) == 1003
    worker.progress.step, worker.progress.slot_step, worker.progress.steps_match = (
        0,
        103,
        False,
    )  # its group forms again
    assert seen.steps(worker, 103) == 1003
    worker.progress.step = 1000
    assert seen.steps(worker, 106) == 1000  # it makes two of them for one that it commits


def test_samples_of_a_long_run_are_thinned_out() -> None:
    room = 1 << 18  # a day or two of this are a month of what there is
    downsampler, kept = Downsampler(room, 1.0), []
    for second in range(2 * 86400):
        if downsampler.keeps(second + 0.01 * (second % 3)):
            downsampler.written += 4096
            kept.append(second)
    assert downsampler.written < 12 * room
    assert kept[:64] == list(range(64))
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 2048
    assert not downsampler.keeps(second)
    assert downsampler.keeps(second, always=True)
