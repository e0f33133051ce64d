"""The phases of one rank on the time axis: a letter for every tenth of a second, as far back as is kept.

All strips lie on one grid of tenths, so that letters of two ranks at the same place were seen at the same time. A
sampler that is a little early or late does not shift what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.contract.events import UNSEEN

TICK = 0.1  # seconds a letter
MOST = 6000  # letters
_LATE = 2  # ticks that a sampler may be late, and nothing was missed
_BACK = 100  # ticks: further back, somebody has set the clock


@dataclass(slots=True)
class Strip:
    end: float = 0.0  # when the last letter ends
    letters: str = ""

    @property
    def start(self) -> float:
        return self.end - TICK * len(self.letters)

    def add(self, now: float, letters: str) -> None:
        """What was seen just before `now`. Where nobody looked there are gaps."""
        tick = round(now / TICK)
        new = tick - round(self.end / TICK)
        if not self.letters or new < -_BACK:
            self.letters = letters[-MOST:]
        elif new <= 0:
            return
        else:
            more = letters if len(letters) == new else _fitted(letters, min(new, MOST))
            self.letters = (self.letters + more)[-MOST:]
        self.end = tick * TICK

    def between(self, start: float, end: float) -> str:
        """Letters of that time, whole ticks."""
        first = round((start - self.start) / TICK)
        last = min(round((end - self.start) / TICK), len(self.letters))
        return UNSEEN * min(-first, last - first) * (first < 0) + self.letters[max(0, first) : max(0, last)]

    def tail(self, seconds: float) -> str:
        return self.letters[-max(1, round(seconds / TICK)) :]


def _fitted(letters: str, size: int) -> str:
    """Exactly so many: the sampler's tenths are not quite ours."""
    gap = size - len(letters)
    if gap > 0:
        return (letters[:1].lower() if letters and gap <= _LATE else UNSEEN) * gap + letters
    over, kept = letters[:-size], letters[-size:]
    return kept if over.islower() or over == UNSEEN * len(over) else kept[0].upper() + kept[1:]  # no step gets lost
