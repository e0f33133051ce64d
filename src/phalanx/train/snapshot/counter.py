"""The step counter of a rank, and the time of its last snapshot, in memory that outlives the rank."""

from __future__ import annotations

import mmap
import os
import struct
import time

from phalanx.worker.snapshot_memory import SnapshotMemoryClient

_STEP = struct.Struct("<q")
_BOTH = struct.Struct("<qd")  # step, and a time by the monotonic clock that all processes of a host share
_PREFIX = "steps."


class Counter:
    """The counter of this rank."""

    def __init__(self, client: SnapshotMemoryClient, rank: int) -> None:
        fd = client.lend(counter_name(rank), mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        step, since = _BOTH.unpack_from(self._memory)
        if not since:
            _BOTH.pack_into(self._memory, 0, step, time.monotonic())

    def set(self, step: int) -> None:
        """Set the committed step."""
        _STEP.pack_into(self._memory, 0, step)

    def begin(self, step: int) -> None:
        """Set the step, and record that a snapshot of it begins now."""
        _BOTH.pack_into(self._memory, 0, step, time.monotonic())

    def close(self) -> None:
        """Unmap the memory; the agent keeps it."""
        self._memory.close()


def counter_name(rank: int) -> str:
    """Return the name of a rank's counter."""
    return f"{_PREFIX}{rank}"


def is_counter(name: str) -> bool:
    """Return whether this is the name of a counter."""
    return name.startswith(_PREFIX)


def reached(client: SnapshotMemoryClient) -> int:
    """Return the newest step that any rank of this node has committed."""
    return max((step for step, _ in _counters(client)), default=0)


def waited(client: SnapshotMemoryClient) -> float:
    """Return the seconds since the ranks of this node began their last snapshot, or since they started."""
    return max((time.monotonic() - since for _, since in _counters(client)), default=0.0)


def _counters(client: SnapshotMemoryClient) -> list[tuple[int, float]]:
    found = []
    for name in filter(is_counter, client.names()):
        fd = client.show(name)
        step, since = _BOTH.unpack(os.pread(fd, _BOTH.size, 0))
        os.close(fd)
        found += [(step, since)] if since else []  # a counter that is just being created has no time yet
    return found
