"""Steps, rates, remaining time and curves."""

from __future__ import annotations

import pytest

from phalanx.contract import events
from tests.watch.model.run_events import FAULT, RESTART, STALL, model_of, sample, started


def test_a_step_that_goes_back_gives_no_negative_rate() -> None:
    model = model_of(*started(), *(sample(second, 10 * second, 10 * second) for second in range(2, 12)))
    assert model.progress.rate == pytest.approx(10)
    assert model.ranks[1].steps.rate == pytest.approx(10)
    model.apply(RESTART)
    model.apply(events.Restarted(time=12, seconds=1.6))
    model.apply(events.AttemptStarted(time=12, attempt=1))
    for second, step in enumerate((-1, 40, 42, 44), start=13):
        model.apply(sample(second, step, step))
        assert model.progress.rate >= 0
        assert model.ranks[0].steps.rate >= 0
    assert (model.progress.step, model.progress.rate, model.run.attempt) == (44, pytest.approx(2), 1)
    assert min(value for _, _, value in model.progress.curves["steps/s"].points) >= 0


@pytest.mark.parametrize(("every", "rate"), [(0.02, 50), (0.7, 1 / 0.7), (5, 0.2), (45, 1 / 45)])
def test_the_rate_is_steady_however_long_a_step_takes(every: float, rate: float) -> None:
    model = model_of(*started())
    rates = []
    for second in range(2, 400):
        model.apply(sample(second, int(second / every), int(second / every)))
        rates.append(model.progress.rate)
    assert all(0.7 * rate < one < 1.4 * rate for one in rates[-100:])


def test_the_rate_of_a_stalled_run_falls_to_zero() -> None:
    model = model_of(*started(), *(sample(second, second, second) for second in range(2, 30)))
    for second in range(30, 60):
        model.apply(sample(second, 29, 29))
    assert model.progress.rate < 0.05
    for second in range(60, 63):
        model.apply(sample(second, second - 30, second - 30))
    assert model.progress.rate == pytest.approx(1)


def test_the_remaining_time_needs_a_total() -> None:
    model = model_of(*started(), *(sample(second, 2 * second, 2 * second) for second in range(2, 12)))
    assert model.progress.eta is None
    model.apply(events.MetricsMeasured(time=11, step=22, total=122, values={"loss": 0.5, "odd": None}, epoch=3))
    assert model.progress.eta == pytest.approx(50)
    assert (model.progress.epoch, model.progress.curves["loss"].points) == (3, [(22, 11, 0.5)])
    assert "odd" not in model.progress.curves


def test_reported_steps_count_where_none_are_seen() -> None:
    model = model_of(*started())
    for second in range(2, 12):
        model.apply(sample(second, -1, -1, phases="n" * 10))
        model.apply(events.MetricsMeasured(time=second + 0.5, step=3 * second, values={"loss": 1.0}))
    assert (model.progress.step, model.progress.rate) == (33, pytest.approx(3, rel=0.1))


def test_the_curve_of_a_script_that_restarts_its_count_uses_seen_steps() -> None:
    model = model_of(*started())
    for second in range(2, 42):
        model.apply(sample(second, second, second))
        model.apply(events.MetricsMeasured(time=second, step=second % 10, values={"loss": 1.0}))
    steps = [step for step, _, _ in model.progress.curves["loss"].points]
    assert steps[10:] == sorted(steps[10:])
    assert steps[-1] == 41


def test_samples_per_second_add_up_and_are_zero_in_a_stall() -> None:
    model = model_of(*started(), sample(2, 1, 1, samples=60.0))
    assert model.progress.samples == 120
    model.apply(STALL)
    model.apply(sample(21, 1, 1, samples=60.0))
    assert (model.progress.samples, model.ranks[0].steps.samples) == (0, 0)


def test_repeated_steps_keep_their_place_in_the_curve() -> None:
    model = model_of(
        *started(), sample(10, 50, 50), events.MetricsMeasured(time=10, step=50, values={"loss": 1.0}), FAULT
    )
    model.apply(events.Recovered(time=11, generation=1, seconds=0.6, step=41, redone=10))
    for step in (41, 43):
        model.apply(events.MetricsMeasured(time=11.1, step=step, values={"loss": 1.0}))
    assert [step for step, *_ in model.progress.curves["loss"].points] == [50, 41, 43]


def test_the_end_of_a_run_does_not_lower_its_rate() -> None:
    model = model_of(*(sample(second, 10 * second, 10 * second, samples=5.0) for second in range(2, 12)))
    for second, state in ((12, "R"), (13, "E")):  # what ends is at nothing that can be seen
        model.apply(sample(second, 110, 110, state=state, phases="....", samples=-1.0))
    model.apply(events.RunEnded(time=14, code=0, seconds=13))
    assert [point[2] for point in model.progress.curves["steps/s"].points[-2:]] == pytest.approx([10, 10])
    assert (model.progress.rate, model.ranks[1].steps.rate, model.progress.samples) == (
        pytest.approx(10),
        pytest.approx(10),
        10.0,
    )
    assert (model.ranks[1].activity.shares.compute, model.ranks[1].activity.shares.waiting) == (0.5, 0.25)
