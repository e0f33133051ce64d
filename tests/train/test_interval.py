"""When a checkpoint is due: by steps, or by rank 0's clock, which is read rarely."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import OptionError
from phalanx.train.schedule.interval import Interval


class Run:
    """Any number of steps, with a simulated clock."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self.now = 100.0
        self.asked = 0

    def broadcast(self, what: Any) -> Any:
        self.asked += 1
        return what

    def due(self, interval: Interval, steps: int, pace: float) -> list[float]:
        """Return the times when it was due, in seconds from the beginning."""
        found = []
        for _ in range(steps):
            self.now += pace
            self.steps += 1
            if interval.passed(self.steps, self):  # type: ignore[arg-type]
                found.append(self.now - 100.0)
        return found


def test_by_steps() -> None:
    run = Run(7)
    assert run.due(Interval(5), 10, 1.0) == [3.0, 8.0]  # steps 10 and 15
    assert Run().due(Interval(None), 10, 1000.0) == []


@pytest.mark.parametrize(("pace", "looks"), [(0.01, 30), (1.0, 20), (40.0, 5)])
def test_by_the_clock(pace: float, looks: int) -> None:
    """Never early, at most a step late, and rarely exchanged."""
    run = Run(1000)
    interval = Interval("1m", clock=lambda: run.now)
    due = run.due(interval, int(190 / pace), pace)
    assert len(due) == (3 if pace < 40 else 2)
    last = 0.0
    for when in due:
        assert 60.0 <= when - last < 60.0 + 2 * pace
        last = when
    assert run.asked <= 3 * looks


def test_what_was_waited_for_before_counts() -> None:
    run = Run()
    first = Interval("1m", clock=lambda: run.now)
    assert run.due(first, 40, 1.0) == []
    again = Interval("1m", clock=lambda: run.now, waited=first.waited)
    assert run.due(again, 40, 1.0) == [60.0]
    assert again.waited == 20.0


def test_steps_that_become_slow() -> None:
    """The next check is not so far ahead that a checkpoint would be much too late."""
    run = Run()
    interval = Interval("10m", clock=lambda: run.now)
    run.due(interval, 10_000, 0.01)
    assert 600.0 <= run.due(interval, 700, 1.0)[0] < 1110.0


@pytest.mark.parametrize("text", ["0", "ten", "5d", "-1", 0, "1.5h"])
def test_invalid_intervals_are_refused(text: str | int) -> None:
    with pytest.raises(OptionError, match="not an interval"):
        Interval(text)
