"""The whole model: any events in any order, bounded memory and time."""

from __future__ import annotations

import statistics
import time
from typing import get_args

import pytest
from hypothesis import given, settings

from phalanx.contract import events
from phalanx.watch.model import simulation
from phalanx.watch.model.events_timeline import KINDS
from phalanx.watch.model.rank import HEALTH
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.status import State
from tests.watch.any_events import EVENTS
from tests.watch.model.run_events import FAULT, AnyEvent, model_of, sample, started


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_any_events_in_any_order(happened: list[AnyEvent]) -> None:
    model = RunModel()
    before: list[float] = [0.0] * 5
    for event in happened:
        model.apply(event)
        assert model.run.state in get_args(State)
        assert 0 <= model.goodput <= 1
        assert model.lost >= 0
        assert model.progress.rate >= 0
        assert model.progress.eta is None or model.progress.eta >= 0
        counts = [model.timeline.counts[kind] for kind in ("fault", "recovered", "restarted", "stalled")]
        assert all(now >= then for now, then in zip([*counts, model.problems.lost_time.seconds], before, strict=True))
        before = [*counts, model.problems.lost_time.seconds]
        assert {one.kind for one in model.timeline.latest} <= set(KINDS)
        for view in model.ranks.values():
            assert view.health in HEALTH
            assert view.steps.rate >= 0
        for histogram in model.ranks.times.values():
            assert all(count >= 0 for count in histogram.counts)


def test_memory_is_bounded_over_days() -> None:
    """Every second has an event of each kind, so that all lists grow fast."""
    model = RunModel()
    for event in simulation.begin(4, now=0):
        model.apply(event)
    for second in range(2, 5000):
        model.apply(sample(second * 60.0, second, second, second, second, phases="w" * 700))
        model.apply(
            events.MetricsMeasured(time=second * 60.0, step=second, values={"loss": 1.0, f"made up {second}": 2.0})
        )
        model.apply(events.NoteEvent(time=second * 60.0, text=f"{second}"))
    assert len(model.timeline.latest) == 500
    assert len(model.progress.curves) == 100
    assert max(len(curve.points) for curve in model.progress.curves.values()) <= 2000
    assert all(len(view.activity.strip.letters) <= 6000 for view in model.ranks.values())
    assert len(model.stragglers.tally._parts) < 100


def test_a_sample_of_512_ranks_is_cheap() -> None:
    model = RunModel()
    took = []
    for event in simulation.run(512, 40):
        then = time.process_time()
        model.apply(event)
        took += [time.process_time() - then] if isinstance(event, events.ClusterSample) else []
    assert statistics.median(took) < 0.1, "2 ms on a machine that does nothing else"


def test_a_clock_that_is_set_back_does_not_stop_the_model() -> None:
    model = model_of(*started(), sample(9000, 1, 1), sample(9001, 2, 2), FAULT)
    for second in range(100, 110):
        model.apply(sample(second, second, second))
    assert (model.now, model.run.state, model.progress.rate) == (109, "running", pytest.approx(1))
    assert model.ranks[0].activity.strip.end == pytest.approx(109)
    assert model.stragglers.tally.seconds <= 10
