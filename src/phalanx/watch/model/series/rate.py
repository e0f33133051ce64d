"""The rate at which a counter grows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WINDOW = 10.0  # seconds
_PAUSE = 4.0  # a gap this many times longer than the usual interval is a pause and does not count


@dataclass(slots=True)
class Rate:
    """The rate of a counter over some seconds. It decreases while the counter stays the same."""

    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=16))  # when it grew, and to what
    each: float = 0.0  # seconds per count; 0: unknown

    def record(self, now: float, count: int) -> None:
        """Record the counter. If it has decreased, the rate restarts from there."""
        marks = self.marks
        if marks:
            then, before = marks[-1]
            if count == before and now >= then:
                return
            quiet = now - then
            if count < before or quiet <= 0 or (quiet > _WINDOW and quiet > _PAUSE * self.each > 0):
                marks.clear()
        marks.append((now, count))
        if len(marks) == 1:
            self.each = 0.0
            return
        while len(marks) > 2 and now - marks[0][0] > _WINDOW:
            marks.popleft()
        start, less = marks[0]
        self.each = (now - start) / (count - less)

    def at(self, now: float) -> float:
        """Return the rate per second; 0 if it is unknown."""
        if not self.each:
            return 0.0
        quiet = now - self.marks[-1][0]
        return 1 / (quiet if quiet > self.each else self.each)
