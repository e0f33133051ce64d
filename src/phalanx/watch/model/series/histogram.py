"""A histogram of durations."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, in the form that Prometheus expects."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))  # per bound; the last: above all
    total: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(BOUNDS, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)
