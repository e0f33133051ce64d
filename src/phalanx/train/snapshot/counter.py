"""How far a rank had come when it died, and how long ago there was a snapshot: in memory that outlives it."""

from __future__ import annotations

import mmap
import os
import struct
import time

from phalanx.worker.snapshot_memory import SnapshotMemoryClient

_STEP = struct.Struct("<q")
_BOTH = struct.Struct("<qd")  # the second by a clock that all processes of a machine share
_PREFIX = "steps."


class Counter:
    def __init__(self, vault: SnapshotMemoryClient, rank: int) -> None:
        fd = vault.lend(counter_name(rank), mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        step, since = _BOTH.unpack_from(self._memory)
        if not since:
            _BOTH.pack_into(self._memory, 0, step, time.monotonic())

    def set(self, step: int) -> None:
        _STEP.pack_into(self._memory, 0, step)

    def begin(self, step: int) -> None:
        """A snapshot of this step."""
        _BOTH.pack_into(self._memory, 0, step, time.monotonic())

    def close(self) -> None:
        self._memory.close()


def counter_name(rank: int) -> str:
    return f"{_PREFIX}{rank}"


def is_counter(name: str) -> bool:
    return name.startswith(_PREFIX)


def reached(vault: SnapshotMemoryClient) -> int:
    """The newest step that any rank of this node had committed."""
    return max((step for step, _ in _told(vault)), default=0)


def waited(vault: SnapshotMemoryClient) -> float:
    """Seconds since the ranks of this node have last begun a snapshot, or since they came."""
    return max((time.monotonic() - since for _, since in _told(vault)), default=0.0)


def _told(vault: SnapshotMemoryClient) -> list[tuple[int, float]]:
    found = []
    for name in filter(is_counter, vault.names()):
        fd = vault.show(name)
        step, since = _BOTH.unpack(os.pread(fd, _BOTH.size, 0))
        os.close(fd)
        found += [(step, since)] if since else []  # one that is just being made has neither
    return found
