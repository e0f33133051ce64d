"""How often a checkpoint is due: every so many steps, or so many minutes."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from phalanx.errors import OptionError

if TYPE_CHECKING:
    from phalanx.train.run import Run


class Interval:
    """`Interval(100)` steps, `Interval("10m")`, "30s", "2h"; None: never."""

    def __init__(self, text: str | int | None) -> None:
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
        self._last = time.monotonic()

    def passed(self, run: Run) -> bool:
        """The same answer on every rank: a checkpoint is made by all of them or by none."""
        if self.steps is not None:
            return run.steps % self.steps == 0
        if self.seconds is None:
            return False
        # By rank 0's clock. Asked at every step this would cost more than the step, so only now and then.
        if run.steps % _LOOK:
            return False
        due = bool(run.broadcast(time.monotonic() - self._last >= self.seconds))
        if due:
            self._last = time.monotonic()
        return due


_LOOK = 16  # steps between two looks at the clock
