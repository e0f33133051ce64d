"""The phases of one rank on the time axis: one letter per tenth of a second.

All strips share one grid of tenths: letters of two ranks at the same position belong to the same time. A sampler that
is slightly early or late does not shift the following letters.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.contract.events import UNSEEN

TICK = 0.1  # seconds per letter
MOST = 6000  # letters
_LEAST = 300  # letters, with any number of ranks
_ALL = 6_000_000  # letters of all ranks together
_LATE = 2  # ticks by which a sampler may be late without having missed anything
_BACK = 100  # ticks: a time further back means that the clock was changed


def room(ranks: int) -> int:
    """Return how many letters each of so many ranks keeps."""
    return max(_LEAST, min(MOST, _ALL // max(1, ranks)))


@dataclass(slots=True)
class Strip:
    """The latest letters of one rank."""

    end: float = 0.0  # when the last letter ends
    letters: str = ""

    @property
    def start(self) -> float:
        """When the first letter begins."""
        return self.end - TICK * len(self.letters)

    def add(self, now: float, letters: str) -> None:
        """Append the letters sampled just before `now`. Gaps are filled with UNSEEN."""
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

    def shorten(self, most: int) -> None:
        """Keep only the last `most` letters."""
        if len(self.letters) > most:
            self.letters = self.letters[-most:]

    def between(self, start: float, end: float) -> str:
        """Return the letters from `start` to `end`, in whole ticks."""
        first = round((start - self.start) / TICK)
        last = min(round((end - self.start) / TICK), len(self.letters))
        return UNSEEN * min(-first, last - first) * (first < 0) + self.letters[max(0, first) : max(0, last)]


def _fitted(letters: str, size: int) -> str:
    """Return `size` letters: the tenths of the sampler are not exactly those of the grid."""
    gap = size - len(letters)
    if gap > 0:
        return (letters[:1].lower() if letters and gap <= _LATE else UNSEEN) * gap + letters
    over, kept = letters[:-size], letters[-size:]
    # Keep the end of a step (a capital letter) even if its own letter is cut off.
    return kept if over.islower() or over == UNSEEN * len(over) else kept[0].upper() + kept[1:]
