"""A series with a bounded length."""

from __future__ import annotations

from phalanx.watch.model.series.curve import MOST, Curve


def test_a_long_curve_keeps_its_shape() -> None:
    curve = Curve()
    for step in range(10 * MOST):
        curve.add(step, float(step), step / 2)
        assert len(curve.points) <= MOST
    steps = [step for step, _, _ in curve.points]
    assert steps == list(range(0, 10 * MOST, curve.every))
    assert curve.last == (10 * MOST - 1) / 2, "the latest, kept or not"


def test_new_points_are_sent_after_thinning() -> None:
    curve, sent, given = Curve(), [], 0
    for step in range(3 * MOST):
        curve.add(step, -float(step), 0.0)  # whatever the clock does
        if step % 7 == 0:
            sent += curve.points[curve.before(given) :]
            given = curve.given
    steps = [step for step, _, _ in sent]
    assert steps == sorted(set(steps)), "none twice"
    assert {step for step, _, _ in curve.points[: curve.before(given)]} <= set(steps)
