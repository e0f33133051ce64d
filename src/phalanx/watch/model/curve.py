"""A series over steps and time that never grows beyond a bound: when it is full, every second point goes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

MOST = 2000

Point = tuple[int, float, float]  # step, time, value


@dataclass
class Curve:
    points: list[Point] = field(default_factory=list)
    every: int = 1  # how many were given for one that is kept
    given: int = 0
    latest: Point | None = None  # kept or not
    _numbers: list[int] = field(default_factory=list)  # of the points, as they were given

    def add(self, step: int, when: float, value: float) -> None:
        self.latest = (step, when, value)
        if self.given % self.every == 0:
            self.points.append(self.latest)
            self._numbers.append(self.given)
            if len(self.points) > MOST:
                del self.points[1::2], self._numbers[1::2]
                self.every *= 2
        self.given += 1

    def before(self, given: int) -> int:
        """How many of its points are among the first so many that were given."""
        return bisect_left(self._numbers, given)

    @property
    def last(self) -> float | None:
        return self.latest[2] if self.latest else None
