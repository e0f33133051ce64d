"""What would be left behind: processes below this one, and files in shared memory that only they had in use."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from . import linux

_MEMORY = "/dev/shm"  # noqa: S108
_PAUSE = 0.2  # between two looks: a stop of many workers is many signals in a row


class Orphans:
    """Look while they live (`note`), and `end` it all: what a killed process cannot tidy up, its keeper does."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._files: set[str] = set()
        self._looked = 0.0

    def note(self, pid: int | None = None) -> None:
        """Remember a process that has been ours; without one, everything below this process and what it holds."""
        if pid is not None:
            self._pids.add(pid)
        elif time.monotonic() - self._looked > _PAUSE:
            self._looked = time.monotonic()
            found = linux.descendants(os.getpid())
            self._pids.update(found)
            for each in found:
                self._files.update(_held(each))

    def end(self, *, besides: frozenset[int] = frozenset()) -> list[int]:
        """End every process below this one, then remove the files. Returns the processes that would not die."""
        if not linux.childless():
            self._looked = 0.0
            self.note()
        left = linux.end_descendants(besides=besides)
        self._remove()
        return left

    def leave(self, *, besides: frozenset[int] = frozenset()) -> frozenset[int]:
        """Leave the processes below this one running, with their files. Returns these processes."""
        left = frozenset() if linux.childless() else frozenset(linux.descendants(os.getpid(), besides=besides))
        self._pids -= left
        self._remove()
        return left

    def _remove(self) -> None:
        # torch names a file after the process that made it, and a killed one cannot unlink it.
        names = tuple(f"torch_{pid}_" for pid in self._pids)
        with contextlib.suppress(OSError):
            self._files.update(f"{_MEMORY}/{name}" for name in os.listdir(_MEMORY) if name.startswith(names))
        candidates = {path for path in self._files if os.path.exists(path)}
        self._files.clear()
        if candidates:
            for path in candidates - _in_use(candidates):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _held(pid: int) -> Iterable[str]:
    """Files in shared memory that a process has mapped or open, and that still have a name."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        found = {line[line.index(_MEMORY) :].rstrip("\n") for line in file if f" {_MEMORY}/" in line}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(f"{_MEMORY}/"):
                    found.add(target)
    return {path for path in found if not path.endswith(" (deleted)")}


def _in_use(candidates: set[str]) -> set[str]:
    """Those that some living process still has: they are somebody else's."""
    return {path for name in os.listdir("/proc") if name.isdigit() for path in _held(int(name)) if path in candidates}
