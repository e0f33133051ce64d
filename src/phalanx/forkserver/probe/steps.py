"""Counts the steps of any script: whatever optimizer it has, it steps."""

from __future__ import annotations

import sys
import time
from typing import Any

from . import status_slot

_AHEAD = 4  # steps of another optimizer, without one of the one that is counted: then that one is counted


class StepCounter:
    """Of one optimizer: a script with two of them counts as one step what it does with both."""

    def __init__(self, own: status_slot.StatusSlot) -> None:
        self._page: status_slot.StatusSlot | None = own
        self._laid = False
        self._counted = 0  # which
        self._others: dict[int, int] = {}  # how often since
        self._steps = 0

    def lay(self) -> None:
        """A hook that torch calls after each step; again and again, until torch is there to have one."""
        if self._laid:
            return
        lay = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
        compiling = getattr(sys.modules.get("torch.compiler"), "is_compiling", None)
        if lay is None or compiling is None:
            return

        def stepped(optimizer: Any, *_: Any) -> None:
            if not compiling():  # a step that is compiled is not to be broken by what cannot be
                self._stepped(id(optimizer))

        lay(stepped)
        self._laid = True

    def forget(self) -> None:
        """In a child of the worker."""
        self._page = None

    def _stepped(self, which: int) -> None:
        if self._page is None:
            return
        if which != self._counted:
            times = self._others[which] = self._others.get(which, 0) + 1
            if self._counted and times <= _AHEAD:
                self._page.step(self._steps, time.monotonic_ns())
                return
            self._counted = which
        if self._others:
            self._others.clear()
        self._steps += 1
        self._page.step(self._steps, time.monotonic_ns())
