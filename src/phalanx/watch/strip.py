"""The phases of one rank on the time axis: a letter for every tenth of a second, as far back as is kept."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.contract.events import UNSEEN

TICK = 0.1  # seconds a letter
MOST = 6000  # letters


@dataclass
class Strip:
    end: float = 0.0  # when the last letter ends
    letters: str = ""

    @property
    def start(self) -> float:
        return self.end - TICK * len(self.letters)

    def add(self, now: float, letters: str) -> None:
        """What was seen just before `now`. Where nobody looked there are gaps."""
        gap = round((now - self.end) / TICK) - len(letters) if self.end else 0
        self.letters = (self.letters + UNSEEN * max(0, min(gap, MOST)) + letters)[-MOST:]
        self.end = now

    def between(self, start: float, end: float) -> str:
        """Letters of that time, whole ticks."""
        first = round((start - self.start) / TICK)
        last = round((end - self.start) / TICK)
        return UNSEEN * min(-first, last - first) * (first < 0) + self.letters[max(0, first) : max(0, last)]
