"""A series over steps and time that never grows beyond a bound: when it is full, every second point goes."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST = 2000


@dataclass
class Curve:
    points: list[tuple[int, float, float]] = field(default_factory=list)  # step, time, value
    every: int = 1  # how many were given for one that is kept
    given: int = 0

    def add(self, step: int, when: float, value: float) -> None:
        if self.given % self.every == 0:
            self.points.append((step, when, value))
            if len(self.points) > MOST:
                del self.points[1::2]
                self.every *= 2
        self.given += 1

    @property
    def last(self) -> float | None:
        return self.points[-1][2] if self.points else None
