"""Survivors that do not join the new group: gloo may wait for ever in an operation whose connections are cut.

A send to a dead rank may stay in a queue, and its waiter is never woken. Such a process can only be replaced. That
loses nothing if another rank has the same state; otherwise another thread of the process copies the state to memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.forkserver import linux

PATIENCE = 0.4  # seconds without CPU use
ON_GPU = 3.0  # the same for a rank on a GPU, which waits there until NCCL's abort has ended its kernels
LAST = 15.0  # the same if no other rank has the state: all since the last snapshot is lost
SAVING = 120.0  # the same while it saves the state: that may be tens of gigabytes


@dataclass
class _Look:
    used: float  # seconds of CPU
    since: float  # when it was last seen to use any


class Unresponsive:
    """Finds workers of one node that do not respond, since the regroup began."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}

    def among(self, missing: Iterable[int], patience: float) -> list[int]:
        """Return those of these processes that have not computed for `patience` seconds."""
        now = time.monotonic()
        return [pid for pid in missing if self._still(pid, now) > patience]

    def _still(self, pid: int, now: float) -> float:
        """Return for how many seconds its main thread has neither computed nor been runnable."""
        seen = linux.thread(pid)
        if seen is None:
            return 0.0
        asleep, used = seen
        look = self._looks.get(pid)
        if look is None or not asleep or used > look.used:
            look = self._looks[pid] = _Look(used, now)
        return now - look.since
