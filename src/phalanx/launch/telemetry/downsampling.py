"""Which of many lines are kept, so that a file of a run that never ends does not grow for ever."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Downsampler:
    """After every `room` bytes the time between two that are kept doubles."""

    room: int
    every: float = 0.0  # seconds, at first
    written: int = 0
    _last: float = float("-inf")

    @property
    def interval(self) -> float:
        return self.every * float(2 ** (self.written // self.room))

    def keeps(self, now: float, *, anyway: bool = False) -> bool:
        """Half a second is left to chance: what comes once a second does not come to the millisecond."""
        if not anyway and 0 <= now - self._last < self.interval - self.every / 2:
            return False
        self._last = now
        return True
