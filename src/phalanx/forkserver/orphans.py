"""Cleans up after workers: processes below this one, and files in shared memory that only they used."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from . import linux

_SHM = "/dev/shm"  # noqa: S108
_SCAN_INTERVAL = 0.2  # seconds between two scans: stopping many workers sends many signals in a row


class Orphans:
    """Records processes and files while they exist (`note`), and ends and removes them (`end`): a killed process cannot
    clean up.
    """

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._files: set[str] = set()
        self._last_scan = 0.0

    def note(self, pid: int | None = None) -> None:
        """Record a process; by default, all processes below this one and the files they use."""
        if pid is not None:
            self._pids.add(pid)
        elif time.monotonic() - self._last_scan > _SCAN_INTERVAL:
            self._last_scan = time.monotonic()
            found = linux.descendants(os.getpid())
            self._pids.update(found)
            for each in found:
                self._files.update(_shm_files(each))

    def end(
        self, *, besides: frozenset[int] = frozenset(), patience: float = 0.0, grace: float = linux.GRACE
    ) -> list[int]:
        """End every process below this one, then remove the files. Return the processes that did not end.

        They have `patience` seconds to end by themselves, and `grace` seconds after SIGTERM.
        """
        if not linux.childless():
            self._last_scan = 0.0
            self.note()
        left = linux.end_descendants(besides=besides, patience=patience, grace=grace)
        self._remove(besides)
        return left

    def leave(self, *, besides: frozenset[int] = frozenset()) -> frozenset[int]:
        """Leave the processes below this one running, with their files. Return these processes."""
        left = frozenset() if linux.childless() else frozenset(linux.descendants(os.getpid(), besides=besides))
        self._pids -= left
        self._remove()
        return left

    def _remove(self, besides: frozenset[int] = frozenset()) -> None:
        # torch names a file after the process that created it. A killed process cannot unlink it.
        names = tuple(f"torch_{pid}_" for pid in self._pids - besides)
        with contextlib.suppress(OSError):
            self._files.update(f"{_SHM}/{name}" for name in os.listdir(_SHM) if name.startswith(names))
        candidates = {path for path in self._files if os.path.exists(path)}
        self._files.clear()
        if candidates:
            for path in candidates - _in_use(candidates):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _shm_files(pid: int) -> Iterable[str]:
    """Return the named files in shared memory that a process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        found = {line[line.index(_SHM) :].rstrip("\n") for line in file if f" {_SHM}/" in line}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(f"{_SHM}/"):
                    found.add(target)
    return {path for path in found if not path.endswith(" (deleted)")}


def _in_use(candidates: set[str]) -> set[str]:
    """Return the candidates that a live process still uses."""
    return {
        path for name in os.listdir("/proc") if name.isdigit() for path in _shm_files(int(name)) if path in candidates
    }
