"""Time lost to failures and stalls."""

from __future__ import annotations

import pytest

from phalanx.contract import events
from tests.watch.model.run_events import FAULT, NOW, RESTART, STALL, VERDICT, model_of, sample, started

LOSSES = {
    "nothing": ([], 0.0),
    "regrouped": ([FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=9)], 0.6),
    "steps done again": (
        [FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=9, redone=4)],
        0.6 + 4 * 0.5,
    ),
    "restarted, until the next step": (
        [RESTART, events.Restarted(time=12, seconds=1.6), NOW, sample(14, -1, -1, phases="iii"), sample(15, 1, 1)],
        1.6 + 3,
    ),
    "stalled": ([STALL, VERDICT, events.Resumed(time=25, seconds=15)], 15.0),
    "stalled, seen before it is reported": (
        [STALL, VERDICT, sample(24, 20, 20), sample(25, 21, 21), events.Resumed(time=25.2, seconds=15.2)],
        15.2,
    ),
    "stalled, and was killed": (
        [
            STALL,
            VERDICT,
            events.FaultEvent(time=22, rank=1, reason="rank 1 failed", recovery="regroup"),
            events.Recovered(time=23, generation=1, seconds=1, step=9),
        ],
        12.0 + 1.0,
    ),
    "hung, and was noticed late": (
        [
            events.FaultEvent(time=22, rank=1, reason="rank 1 failed", recovery="regroup", idle=12),
            events.Recovered(time=23, generation=1, seconds=1, step=9, idle=12),
        ],
        12.0 + 1.0,
    ),
    "hung, was diagnosed, and then replaced": (
        [
            STALL,
            VERDICT,
            events.FaultEvent(time=22, rank=1, reason="rank 1 failed", recovery="regroup", idle=12),
            events.Recovered(time=23, generation=1, seconds=1, step=9, idle=12),
            events.Resumed(time=23.2, seconds=13.2),
        ],
        12.0 + 1.0,
    ),
    "two faults at once": (
        [
            FAULT,
            events.FaultEvent(time=10.5, rank=0, reason="x", recovery="regroup"),
            events.Recovered(time=11, generation=2, seconds=0.6, step=9),
        ],
        0.6,
    ),
    "to the end": ([STALL, VERDICT, events.RunEnded(time=30, code=1, seconds=30)], 20.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_lost_time_and_goodput(name: str) -> None:
    happened, lost = LOSSES[name]
    model = model_of(*started(), *(sample(second, 2 * second, 2 * second) for second in range(2, 11)), *happened)
    assert model.lost == pytest.approx(lost)
    assert model.problems.lost_time.seconds == pytest.approx(lost)
    model.apply(events.NoteEvent(time=102, text="later"))
    assert model.goodput == pytest.approx(1 - lost / 100), "of the time since the first step, at 2 s"


def test_the_measured_goodput_replaces_the_estimate() -> None:
    happened, _ = LOSSES["hung, and was noticed late"]
    model = model_of(*started(), *(sample(second, 2 * second, 2 * second) for second in range(2, 11)), *happened)
    model.apply(events.GoodputMeasured(time=30, lost=14.0, seconds=56.0))
    model.apply(events.RunEnded(time=31, code=0, seconds=31))
    assert (model.lost, model.goodput) == (14.0, 0.75)


def test_an_ongoing_stall_counts_as_lost_time() -> None:
    model = model_of(*started(), sample(2, 1, 1), STALL)
    assert model.lost == pytest.approx(10)
    model.apply(sample(25, 1, 1))
    assert (model.lost, model.problems.lost_time.seconds) == (pytest.approx(15), 0)
