"""Halts at a step that all ranks agree on during the training: no rank waits in a collective for one that has halted.

The agent requests it. Each rank answers at once, from a thread, which step it has committed, and then makes at most one
more. All halt one step after the newest of these: every rank can reach it, and none has passed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Halted(BaseException):
    """The training ends at this step as requested, with a checkpoint. `except Exception` does not catch it: it is not
    an error.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"halted at step {step}")
        self.step = step


class Halting:
    """The halt of one training. `steps` returns the number of committed steps."""

    def __init__(self, steps: Callable[[], int]) -> None:
        self.asked = False
        self.stuck = False  # the training has raised, and the agent has not sent what follows
        self._steps = steps
        self._changed = threading.Condition()
        self._allowed: int | None = None  # the last step that may be committed before the goal is known
        self._goal: int | None = None

    def ask(self) -> int:
        """Return the committed step. From now on this rank waits after its next step."""
        with self._changed:
            self.asked = True  # first: a step that is committed after the count was read checks this
            committed = self._steps()
            self._allowed = committed + 1
            self._changed.notify_all()
            return committed

    def settle(self, goal: int) -> None:
        """Set the step to halt at."""
        with self._changed:
            self._goal = goal
            self._changed.notify_all()

    def reached(self, step: int, moved: Callable[[], bool]) -> bool:
        """Return whether to halt after this committed step. Waits until the goal is known, or `moved` returns true."""
        if not self.asked:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._allowed is not None or moved())
            if self._allowed is None or step < self._allowed:
                return False
            self._changed.wait_for(lambda: self._goal is not None or moved())
            return self._goal is not None and step >= self._goal

    def stir(self) -> None:
        """Check `moved` again."""
        with self._changed:
            self._changed.notify_all()
