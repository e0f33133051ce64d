"""Signals that a worker ignores, because its agent handles them.

A scheduler signals every process of a job. The agent decides whether the run ends at once or after a checkpoint, so a
worker ignores the signal until the agent ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Any


class IgnoredSignals:
    """Ignores signals, unless the script has a handler or sets one later."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._pid = os.getpid()
        self._taken: list[int] = []
        self._children: Any = None  # torch's handler of SIGCHLD, while it is replaced
        with contextlib.suppress(ValueError):  # not in the main thread: nothing is changed
            for number in numbers:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._ignore)
                    self._taken.append(number)
        if self._taken:
            os.register_at_fork(after_in_child=self.end)

    def _ignore(self, number: int, _: object) -> None:  # noqa: ARG002
        """Ignore the signal. Workers of a DataLoader have received it too, and exit: torch's SIGCHLD handler would
        raise anywhere, even within an update, so it is replaced. Waiting for the next batch raises soon enough.
        """
        if self._children is None and callable(signal.getsignal(signal.SIGCHLD)):
            self._children = signal.signal(signal.SIGCHLD, lambda *_: None)

    def ignores(self, number: int) -> bool:
        """Return whether the signal is ignored here, so that `die` exits by it."""
        return number in self._taken and signal.getsignal(number) == self._ignore and os.getpid() == self._pid

    def die(self, number: int) -> None:
        """Exit by the signal, as without a handler. Any thread may call it, also while the main thread waits in C++."""
        if self.ignores(number):
            ctypes.CDLL(None).signal(number, None)
            os.kill(self._pid, number)

    def end(self) -> None:
        """Restore all handlers; also in a fork, so that its parent can end it with such a signal."""
        with contextlib.suppress(ValueError):
            for number in self._taken:
                if signal.getsignal(number) == self._ignore:
                    signal.signal(number, signal.SIG_DFL)
            if self._children is not None:
                signal.signal(signal.SIGCHLD, self._children)
        self._taken, self._children = [], None
