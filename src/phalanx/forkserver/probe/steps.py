"""Counts the steps of any script, through torch's optimizer hook."""

from __future__ import annotations

import time
from typing import Any

from .. import hidden_modules
from ..board import status_slot

_SWITCH_AFTER = 4  # steps of another optimizer, without one of the counted optimizer, after which the other is counted


class StepCounter:
    """Counts the steps of one optimizer: if a script has two, a step with both counts once."""

    def __init__(self, own: status_slot.StatusSlot) -> None:
        self._slot: status_slot.StatusSlot | None = own
        self._installed = False
        self._optimizer = 0  # id of the optimizer
        self._others: dict[int, int] = {}  # id -> steps since
        self._steps = 0

    def install(self) -> None:
        """Install the hook that torch calls after each step. Called repeatedly until torch is imported."""
        if self._installed:
            return
        install = getattr(hidden_modules.find("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
        compiling = getattr(hidden_modules.find("torch.compiler"), "is_compiling", None)
        if install is None or compiling is None:
            return

        def stepped(optimizer: Any, *_: Any) -> None:
            if not compiling():  # must not break a compiled step
                self._stepped(id(optimizer))

        install(stepped)
        self._installed = True

    def detach(self) -> None:
        """Stop counting, in a child of the worker."""
        self._slot = None

    def _stepped(self, which: int) -> None:
        if self._slot is None:
            return
        if which != self._optimizer:
            times = self._others[which] = self._others.get(which, 0) + 1
            if self._optimizer and times <= _SWITCH_AFTER:
                self._slot.step(self._steps, time.monotonic_ns())
                return
            self._optimizer = which
        if self._others:
            self._others.clear()
        self._steps += 1
        self._slot.step(self._steps, time.monotonic_ns())
