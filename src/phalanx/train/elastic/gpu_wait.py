"""Detects that the GPU does not let the main thread leave a lost group.

A thread that waits for its GPU computes, as far as another process can see. Only the process itself can tell that its
group is lost, that NCCL's abort has not returned, and that its script stays at the same place.
"""

from __future__ import annotations

import sys
import threading
import time
from types import CodeType

from phalanx.worker.process_group import nccl


class GpuWait:
    """Asked at short intervals, by one thread."""

    def __init__(self) -> None:
        self.warming: threading.Thread | None = None  # opens the CUDA context, which may take long
        self.connecting = False  # on a GPU, to ranks that this rank has met
        self._seen: tuple[object, ...] | None = None  # the lost group, and where the main thread is
        self._since = 0.0

    def is_endless(self, lost: int | None) -> bool:
        """Return whether the main thread has waited for the GPU for longer than NCCL needs to abort.

        `lost`: the generation that it should leave; None: there is no other one. While NCCL connects it to other ranks,
        there is no communicator to abort yet. A main thread that computes on the CPU, for example to compile a model,
        has as much time as it needs.
        """
        connecting = self.connecting and (self.warming is None or not self.warming.is_alive())
        seen, now = None if lost is None else (lost, connecting, _place()), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        late = seen is not None and now - self._since > nccl.PATIENCE
        return late and (connecting or nccl.is_blocked())


def _place() -> tuple[CodeType, int | None] | None:
    """Return where the script of the main thread is: the innermost function, and its line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (frame.f_code, frame.f_lineno)
