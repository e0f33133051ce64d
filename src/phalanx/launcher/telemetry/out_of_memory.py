"""Detects whether the kernel has killed processes for memory, and how much memory is free, by cgroup and machine.

The machine's counter increases with every such kill, also in other containers. By itself it only shows that a worker
may have been killed for memory; the kernel log, if readable, names the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_TOGETHER = 2.0  # seconds between kills of one cause
_RECENT = 60.0  # seconds: older records of the kernel log are about another process with this pid
_KILLED = re.compile(r"out of memory.*Killed process (\d+) ", re.IGNORECASE)
_RECORD = 8192  # bytes of the largest record
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # its inode: the kernel log has the pids of that namespace
MACHINE = "possibly for memory: at that time the kernel killed a process somewhere on this machine to free some"
PROCESS = "the machine or a cgroup ran out of memory, and the kernel killed this process to free some"


@dataclass(frozen=True)
class MemoryKills:
    """How often the out-of-memory killer has acted, as far as visible to this process."""

    group: int
    machine: int
    limit: int | None = None  # bytes that the cgroup may use

    def since(self, before: MemoryKills) -> str:
        """Describe what happened since `before`. Empty if nothing did."""
        if self.group > before.group:
            limit = f" (limit {self.limit / 2**30:.1f} GiB)" if self.limit else ""
            return f"the kernel killed a process of this cgroup for using too much memory{limit}"
        if self.machine > before.machine:
            return MACHINE
        return ""


def read(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> MemoryKills:
    """Read the counters of the out-of-memory killer."""
    group, limit = 0, None
    with contextlib.suppress(OSError):
        with open(f"{proc}/self/cgroup") as file:
            lines = file.read().splitlines()
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                kills, most = _version2(cgroups, path)
            elif "memory" in controllers.split(","):
                kills, most = _version1(cgroups, path)
            else:
                continue
            group, limit = group + kills, limit or most
    return MemoryKills(group, _field(f"{proc}/vmstat", "oom_kill"), limit)


def in_kernel_log(pid: int, path: str = "/dev/kmsg", namespace: str = "/proc/self/ns/pid") -> bool | None:
    """Return whether the kernel log says that this process was killed for memory. None: it cannot be read here."""
    try:
        if os.stat(namespace).st_ino != _FIRST_PID_NAMESPACE:
            return None
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # not permitted, in many containers and for many users
        return None
    try:
        return any(_names(record, pid) for record in _records(log))
    except OSError:
        return None
    finally:
        os.close(log)


def _records(log: int) -> Iterator[str]:
    while True:
        try:
            record = os.read(log, _RECORD)
        except BlockingIOError:  # the end
            return
        except OSError as error:
            if error.errno != errno.EPIPE:  # the record was overwritten while it was read
                raise
            continue
        if not record:
            return
        yield record.decode(errors="replace")


def _names(record: str, pid: int) -> bool:
    """Return whether a record `priority,number,microseconds,…;text` is about this process, and recent."""
    killed = _KILLED.search(record)
    if killed is None or int(killed[1]) != pid:
        return False
    return time.monotonic() - int(record.split(",", 3)[2]) / 1e6 < _RECENT


class MemoryKillWatch:
    """Detects whether the kernel has killed a worker for memory, each time that one was killed."""

    def __init__(
        self,
        read: Callable[[], MemoryKills] = read,
        clock: Callable[[], float] = time.monotonic,
        in_log: Callable[[int], bool | None] = in_kernel_log,
    ) -> None:
        self._read = read
        self._clock = clock
        self._in_log = in_log
        self._before = self._read()
        self._text = ""  # about the latest kill
        self._seen = 0.0

    def latest(self, pid: int) -> str:
        """Describe what the kernel did to this worker since the last call, or a moment before: several may be killed at
        the same time.
        """
        now = self._read()
        if text := now.since(self._before):
            self._text, self._seen = text, self._clock()
        self._before = now
        if not self._text or self._clock() - self._seen >= _TOGETHER:
            return ""
        if self._text != MACHINE:
            return self._text
        return {True: PROCESS, False: "", None: MACHINE}[self._in_log(pid)]


def free_memory(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Return how many bytes are still available: on the machine, and in each cgroup of this process."""
    free = [_field(f"{proc}/meminfo", "MemAvailable:") * 1024]
    with contextlib.suppress(OSError), open(f"{proc}/self/cgroup") as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                for base in (cgroups, os.path.join(cgroups, "unified")):
                    free += _free_in_cgroups(base, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                free += _free_in_cgroups(os.path.join(cgroups, "memory"), path, *names)
    return max(0, min(free))


def _free_in_cgroups(root: str, path: str, limit: str, usage: str, cache: str) -> list[int]:
    """Return the free bytes of a cgroup and all above it. In a container the path may not be visible."""
    found = []
    while True:
        folder = os.path.normpath(f"{root}/{path}")
        most, used = _number(f"{folder}/{limit}"), _number(f"{folder}/{usage}")
        if most is not None and used is not None:
            found.append(most - used + _field(f"{folder}/memory.stat", cache))  # the page cache can be reclaimed
        if path in ("/", ""):
            return found
        path = os.path.dirname(path)


def _version2(root: str, path: str) -> tuple[int, int | None]:
    """Return the kills in this cgroup, by its own limit or that of an ancestor, and its limit."""
    for base in (root, os.path.join(root, "unified")):
        folder = os.path.normpath(base + path)
        if os.path.exists(os.path.join(folder, "memory.events")):
            return _field(os.path.join(folder, "memory.events"), "oom_kill"), _number(
                os.path.join(folder, "memory.max")
            )
    return 0, None


def _version1(root: str, path: str) -> tuple[int, int | None]:
    base = os.path.join(root, "memory")
    for folder in (os.path.normpath(base + path), base):
        control = os.path.join(folder, "memory.oom_control")
        if os.path.exists(control):
            return _field(control, "oom_kill"), _number(os.path.join(folder, "memory.limit_in_bytes"))
    return 0, None


def _field(path: str, name: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            key, _, value = line.partition(" ")
            if key == name:
                return int(value.removesuffix("kB\n"))
    return 0


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        number = int(file.read())
        return number if number < 1 << 60 else None  # version 1 writes a huge number for "no limit"
    return None
