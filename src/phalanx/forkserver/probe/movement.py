"""Detects whether the main thread moves: from place to place, or through steps and collectives at the same place."""

from __future__ import annotations

import time
from collections import deque

_WINDOW = 50  # samples: five seconds

Place = tuple[int, int, int]  # ids of frame and code, and the instruction


class Movement:
    """Compares every sample of the main thread with the previous one."""

    def __init__(self) -> None:
        self.moves = 0
        self.moved = 0  # time of the last movement, in nanoseconds of `time.monotonic`
        self._place: Place = (0, 0, 0)
        self._counts: tuple[int, ...] = ()
        self._recent: deque[int] = deque(maxlen=_WINDOW)

    def stays(self, here: Place) -> bool:
        """Return whether this is the place of the last sample."""
        return here == self._place

    def update(self, here: Place, counts: tuple[int, ...], now: int) -> bool:
        """Add a sample. Return whether the main thread has moved, or is at the same place with other `counts` of steps
        and collectives.
        """
        moved = here != self._place or counts != self._counts
        if moved:
            self.moves += 1
            self.moved = now
            self._place, self._counts = here, counts
        self._recent.append(here[1])
        return moved

    @property
    def places(self) -> int:
        """The number of code objects in the last samples."""
        return len(set(self._recent))

    @property
    def still(self) -> float:
        """Seconds since it last moved."""
        return max(0.0, (time.monotonic_ns() - self.moved) / 1e9) if self.moved else 0.0
