"""Read the frames of other threads.

In Python 3.11 `sys._current_frames()` and `frame.f_back` create frame objects, and creating an object can start the
garbage collector. A finalizer that releases the GIL lets the other thread continue; the frame that was being read is
then gone, and Python returns an unrelated object or crashes. Later versions collect only between two instructions.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext


class _WithoutCollector:
    """Keeps the garbage collector off while any thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in between
        self._depth = 0
        self._enabled = False  # before the first thread came in
        os.register_at_fork(after_in_child=self._reset)

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._depth == 1 and self._enabled:
                gc.enable()
            self._depth -= 1

    def _reset(self) -> None:
        """Start again in a forked child, where the thread that was inside does not exist."""
        self._lock = threading.RLock()
        if self._depth and self._enabled:
            gc.enable()
        self._depth = 0


_shared = _WithoutCollector() if sys.version_info < (3, 12) else None


def reading() -> AbstractContextManager[None]:
    """Return the context in which frames of other threads are read."""
    return _shared or nullcontext()
