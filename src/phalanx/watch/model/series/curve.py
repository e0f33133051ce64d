"""A series over steps and time with a bounded number of points."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

MOST = 2000

Point = tuple[int, float, float]  # step, time, value


@dataclass
class Curve:
    """The points of one metric. When there are more than `MOST`, every second one is dropped."""

    points: list[Point] = field(default_factory=list)
    every: int = 1  # keep one of this many added points
    given: int = 0  # points added so far
    latest: Point | None = None  # kept or not
    _numbers: list[int] = field(default_factory=list)  # of the kept points: how many were added before each

    def add(self, step: int, when: float, value: float) -> None:
        """Add a point."""
        self.latest = (step, when, value)
        if self.given % self.every == 0:
            self.points.append(self.latest)
            self._numbers.append(self.given)
            if len(self.points) > MOST:
                del self.points[1::2], self._numbers[1::2]
                self.every *= 2
        self.given += 1

    def before(self, given: int) -> int:
        """Return how many of `points` are among the first `given` points added."""
        return bisect_left(self._numbers, given)

    @property
    def last(self) -> float | None:
        """The latest value."""
        return self.latest[2] if self.latest else None
