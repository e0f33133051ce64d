"""Signals that a worker leaves to its agent.

A scheduler signals every process of a job. Whether that ends the run at once, or after a checkpoint, the agent
decides; so a worker does not die of it, until it is told to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Any


class IgnoredSignals:
    """A handler that the script has made, or makes later, is the script's: it stays."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._pid = os.getpid()
        self._taken: list[int] = []
        self._children: Any = None  # torch's handler of dead children, once it is set aside
        with contextlib.suppress(ValueError):  # not the main thread: it stays as it is
            for number in numbers:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._ignore)
                    self._taken.append(number)
        if self._taken:
            os.register_at_fork(after_in_child=self.end)

    def _ignore(self, number: int, _: object) -> None:  # noqa: ARG002
        """Those who load data have got it as well, and die. torch would raise that wherever this process is, also in
        the middle of an update; it is seen early enough where the next batch is waited for."""
        if self._children is None and callable(signal.getsignal(signal.SIGCHLD)):
            self._children = signal.signal(signal.SIGCHLD, lambda *_: None)

    def die(self, number: int) -> None:
        """From any thread, and though the main one waits in C++: as if there were no handler."""
        if number in self._taken and signal.getsignal(number) == self._ignore and os.getpid() == self._pid:
            ctypes.CDLL(None).signal(number, None)
            os.kill(self._pid, number)

    def end(self) -> None:
        """Everything as it was; also in a fork, which its parent may want to end by such a signal."""
        with contextlib.suppress(ValueError):
            for number in self._taken:
                if signal.getsignal(number) == self._ignore:
                    signal.signal(number, signal.SIG_DFL)
            if self._children is not None:
                signal.signal(signal.SIGCHLD, self._children)
        self._taken, self._children = [], None
