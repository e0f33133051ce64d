"""How fast something counts up, smoothed over some seconds; the longer nothing comes, the slower it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WINDOW = 10.0  # seconds
_PAUSE = 4.0  # times as long as usual: it stood still, which is not how fast it is now


@dataclass(slots=True)
class Rate:
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=16))  # each time that it was more
    each: float = 0.0  # seconds for one; 0: unknown

    def see(self, now: float, count: int) -> None:
        """Of a count that goes back nothing is known but where it goes on."""
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
        """A second."""
        if not self.each:
            return 0.0
        quiet = now - self.marks[-1][0]
        return 1 / (quiet if quiet > self.each else self.each)
