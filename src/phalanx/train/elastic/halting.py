"""Halting at a step that all ranks agree on, while they go on: none waits in a collective for one that has halted.

The agent asks. Each rank says at once, from a thread, which step it has committed, and then goes no further than
one step. The newest of all those steps and one more is what every rank can reach, and none has passed: there they halt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Halted(BaseException):
    """The training ends here, as it was asked to; what is kept is in a checkpoint. No error: `except Exception` is not
    meant."""

    def __init__(self, step: int) -> None:
        super().__init__(f"halted at step {step}")
        self.step = step


class Halting:
    """`steps` are those that are committed by now."""

    def __init__(self, steps: Callable[[], int]) -> None:
        self.asked = False
        self._steps = steps
        self._changed = threading.Condition()
        self._allowed: int | None = None  # this step may be committed before it is known where to halt
        self._goal: int | None = None

    def ask(self) -> int:
        """Where this rank stands, for good: from here on it waits after its next step."""
        with self._changed:
            self.asked = True  # first: whoever commits after it was read looks at this
            committed = self._steps()
            self._allowed = committed + 1
            self._changed.notify_all()
            return committed

    def settle(self, goal: int) -> None:
        with self._changed:
            self._goal = goal
            self._changed.notify_all()

    def reached(self, step: int, moved: Callable[[], bool]) -> bool:
        """Between two steps: whether the one that is committed is the one to halt at. Waits until that is known, or
        `moved`."""
        if not self.asked:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._allowed is not None or moved())
            if self._allowed is None or step < self._allowed:
                return False
            self._changed.wait_for(lambda: self._goal is not None or moved())
            return self._goal is not None and step >= self._goal

    def stir(self) -> None:
        """`moved` may be true by now."""
        with self._changed:
            self._changed.notify_all()
