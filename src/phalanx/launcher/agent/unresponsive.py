"""Survivors that do not come to the new group: gloo may wait for ever in an operation whose connections are cut.

What it sends to a rank that has died may stand in a queue of its own, and whoever waits for that is never told that it
is in vain. Such a process cannot be woken. Another in its place loses nothing, if somebody else has what it has; where
nobody has, a thread of it that does not wait puts it into memory first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.forkserver import linux

PATIENCE = 0.4  # seconds without a sign of work
ON_GPU = 3.0  # the same for a rank on a GPU, which waits there until NCCL's abort has ended its kernels
LAST = 15.0  # the same where nobody else has the state: what is lost then is what was done since the last snapshot
SAVING = 120.0  # the same while it saves that: tens of gigabytes may have to be copied


@dataclass
class _Look:
    used: float  # seconds of CPU
    since: float  # when it was last seen to use any


class Unresponsive:
    """Of the workers of one node, since the group began to form anew."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}

    def among(self, missing: Iterable[int], patience: float) -> list[int]:
        """Those of these processes that have given no sign of work for so long: they are not coming."""
        now = time.monotonic()
        return [pid for pid in missing if self._still(pid, now) > patience]

    def _still(self, pid: int, now: float) -> float:
        """Seconds for which its main thread has neither computed nor been ready to."""
        seen = linux.thread(pid)
        if seen is None:
            return 0.0
        asleep, used = seen
        look = self._looks.get(pid)
        if look is None or not asleep or used > look.used:
            look = self._looks[pid] = _Look(used, now)
        return now - look.since
