"""A series over steps and time that never grows beyond a bound: when it is full, every second point goes."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST = 2000

Point = tuple[int, float, float]  # step, time, value


@dataclass
class Curve:
    points: list[Point] = field(default_factory=list)
    every: int = 1  # how many were given for one that is kept
    given: int = 0
    latest: Point | None = None  # kept or not

    def add(self, step: int, when: float, value: float) -> None:
        self.latest = (step, when, value)
        if self.given % self.every == 0:
            self.points.append(self.latest)
            if len(self.points) > MOST:
                del self.points[1::2]
                self.every *= 2
        self.given += 1

    def since(self, point: Point | None) -> list[Point]:
        """What has come after one of its points, which may be gone by now."""
        if point is None:
            return list(self.points)
        new = len(self.points)
        while new and self.points[new - 1] is not point and self.points[new - 1][1] >= point[1]:
            new -= 1
        return self.points[new:]

    @property
    def last(self) -> float | None:
        return self.latest[2] if self.latest else None
