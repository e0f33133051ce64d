"""How often a checkpoint is due: every so many steps, or so many minutes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from phalanx.errors import OptionError

T = TypeVar("T")


class SteppingRun(Protocol):
    """A training run, as far as an interval needs it."""

    steps: int

    def broadcast(self, obj: T, src: int = 0) -> T: ...


class Interval:
    """`Interval(100)` steps, `Interval("10m")`, "30s", "2h"; None: never."""

    def __init__(
        self, text: str | int | None, clock: Callable[[], float] = time.monotonic, *, waited: float = 0.0
    ) -> None:
        self.steps: int | None = None
        self.seconds: float | None = None
        found = re.fullmatch(r"(\d+)\s*([smh]?)", str(text).strip()) if text is not None else None
        if text is not None and (found is None or int(found[1]) < 1):
            raise OptionError(
                f"checkpoints every {text!r} cannot be",
                details=["expected a number of steps, or a time: 100, 30s, 10m, 2h"],
                fix='every=100, or every="10m"',
            )
        if found is not None and found[2]:
            self.seconds = int(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]
        elif found is not None:
            self.steps = int(found[1])
        self._seen = clock()  # when the clock was looked at
        self._last = self._seen - waited  # when a checkpoint was due
        self._looked = self._next = 0  # steps: of the last look, and of the one to come
        self._clock = clock

    @property
    def waited(self) -> float:
        """Seconds since one was due."""
        return self._clock() - self._last

    def passed(self, run: SteppingRun) -> bool:
        """The same answer on every rank: a checkpoint is made by all of them or by none."""
        if self.steps is not None:
            return run.steps % self.steps == 0
        if self.seconds is None or run.steps < self._next:
            return False
        # By rank 0's clock. At every step this would cost more than the step, so that rank also says when to ask again.
        now = self._clock()
        rest = self._last + self.seconds - now
        pace = (now - self._seen) / max(run.steps - self._looked, 1)  # seconds a step, of late
        ahead = min((rest if rest > 0 else self.seconds) / 2, _LOOK_EVERY) / pace if self._looked and pace > 0 else 1
        due, ahead = run.broadcast((rest <= 0, max(int(ahead), 1)))
        self._seen, self._looked, self._next = now, run.steps, run.steps + ahead
        if due:
            self._last = now
        return due


_LOOK_EVERY = 5.0  # seconds at most between two looks at the clock, if steps take as long as before
