"""How fast something counts up, smoothed over some seconds; the longer nothing comes, the slower it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WINDOW = 10.0  # seconds
_PAUSE = 4.0  # times as long as usual: it stood still, which is not how fast it is now


@dataclass(slots=True)
class Rate:
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=16))  # each time that it was more

    def see(self, now: float, count: int) -> None:
        """Of a count that goes back nothing is known but where it goes on."""
        marks = self.marks
        if marks:
            then, before = marks[-1]
            if count == before and now >= then:
                return
            if count < before or now <= then or now - then > max(_WINDOW, _PAUSE * self._each()):
                marks.clear()
        marks.append((now, count))
        while len(marks) > 2 and now - marks[0][0] > _WINDOW:
            marks.popleft()

    def at(self, now: float) -> float:
        """A second."""
        each = self._each()
        return 1 / max(each, now - self.marks[-1][0]) if each else 0.0

    def _each(self) -> float:
        """Seconds for one; 0: unknown."""
        if len(self.marks) < 2:
            return 0.0
        (start, less), (end, more) = self.marks[0], self.marks[-1]
        return (end - start) / (more - less)
