"""How often a checkpoint or a snapshot is due: every N steps, or every N seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from phalanx.errors import OptionError

T = TypeVar("T")


class BroadcastGroup(Protocol):
    """A process group, as far as an interval needs it."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src`."""
        ...


class Interval:
    """`Interval(100)`: every 100 steps; `Interval("10m")`, "30s", "2h": a time; `Interval(None)`: never."""

    def __init__(
        self, text: str | int | None, clock: Callable[[], float] = time.monotonic, *, waited: float = 0.0
    ) -> None:
        self.steps: int | None = None
        self.seconds: float | None = None
        found = re.fullmatch(r"(\d+)\s*([smh]?)", str(text).strip()) if text is not None else None
        if text is not None and (found is None or int(found[1]) < 1):
            raise OptionError(
                f"checkpoints every {text!r}: not an interval",
                details=["expected a number of steps, or a time: 100, 30s, 10m, 2h"],
                fix='every=100, or every="10m"',
            )
        if found is not None and found[2]:
            self.seconds = int(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]
        elif found is not None:
            self.steps = int(found[1])
        self._seen = clock()  # last time the clock was read
        self._last = self._seen - waited  # when a checkpoint was due
        self._looked = self._next = 0  # the steps of the last reading and of the next
        self._clock = clock

    @property
    def waited(self) -> float:
        """Seconds since a checkpoint was due."""
        return self._clock() - self._last

    def passed(self, step: int, group: BroadcastGroup) -> bool:
        """Return whether a checkpoint is due after this step. All ranks get the same answer."""
        if self.steps is not None:
            return step % self.steps == 0
        if self.seconds is None or step < self._next:
            return False
        # Rank 0's clock decides. A broadcast per step would cost more than the step: rank 0 also sends the step of the
        # next broadcast.
        now = self._clock()
        rest = self._last + self.seconds - now
        step_time = (now - self._seen) / max(step - self._looked, 1)
        ahead = 1.0
        if self._looked and step_time > 0:
            ahead = min((rest if rest > 0 else self.seconds) / 2, _LOOK_EVERY) / step_time
        due, skip = group.broadcast((rest <= 0, max(int(ahead), 1)))
        self._seen, self._looked, self._next = now, step, step + skip
        if due:
            self._last = now
        return due


_LOOK_EVERY = 5.0  # maximum seconds between two readings of the clock, if steps take as long as before
