"""Process and host statistics from /proc. Rates are averages since the previous reading."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.diagnose.evidence import Process

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHORTEST = 0.2  # seconds over which a rate is computed
_ESTABLISHED = "01"
_MOST_CHILDREN = 64  # listed per rank
_LONGEST = 120  # characters of a child's command line


@dataclass(frozen=True)
class _Count:
    """Counters at one moment."""

    time: float
    cpu: float
    faults: int
    read: int
    written: int


@dataclass(frozen=True)
class ProcessStats:
    """State and rates of one process."""

    state: str
    cpu: float = 0.0  # cores in use, plus time that the main thread waited for one
    faults: float = 0.0  # major page faults per second
    read: float = 0.0  # bytes per second, files and sockets
    written: float = 0.0
    resident: int = 0  # bytes


class ProcessStatsReader:
    """Reads statistics of processes and keeps the previous counters, to compute rates."""

    def __init__(self) -> None:
        self._before: dict[int, _Count] = {}
        self._rates: dict[int, ProcessStats] = {}
        self._swapped: tuple[float, int] = (time.monotonic(), _swaps())

    def read(self, pid: int) -> ProcessStats:
        """Return the state and rates of a process. Cheap enough to call every second."""
        fields = _stat(pid)
        if fields is None:
            return ProcessStats("X")
        read, written = _io(pid)
        cpu = (int(fields[11]) + int(fields[12])) / _TICK + _delayed(pid)
        now = _Count(time.monotonic(), cpu, int(fields[9]), read, written)
        before = self._before.get(pid, now)
        passed = now.time - before.time
        state = fields[0].decode()
        resident = int(fields[21]) * _PAGE
        if passed < _SHORTEST:  # too soon for new rates
            self._before[pid] = before
            return replace(self._rates.get(pid, ProcessStats(state)), state=state, resident=resident)
        self._before[pid] = now
        self._rates[pid] = ProcessStats(
            state,
            round((now.cpu - before.cpu) / passed, 3),
            round((now.faults - before.faults) / passed, 1),
            round((now.read - before.read) / passed),
            round((now.written - before.written) / passed),
            resident,
        )
        return self._rates[pid]

    def forget(self, living: set[int]) -> None:
        """Drop the counters of all other processes."""
        self._before = {pid: count for pid, count in self._before.items() if pid in living}
        self._rates = {pid: rates for pid, rates in self._rates.items() if pid in living}

    def swapping(self) -> float:
        """Return pages per second that this host swapped in and out since the previous call."""
        now, pages = time.monotonic(), _swaps()
        (then, before), self._swapped = self._swapped, (now, pages)
        return (pages - before) / (now - then) if now > then else 0.0


def describe(pid: int, stats: ProcessStats, children: list[int]) -> Process:
    """Return everything known about a worker process. `children` are the pids of its descendants."""
    status = _status(pid)
    sockets, unsent = _connections(pid)
    return Process(
        pid=pid,
        state=stats.state,
        cpu=stats.cpu,
        major_faults=stats.faults,
        read=stats.read,
        written=stats.written,
        resident=status.get("VmRSS", 0) * 1024,
        swapped=status.get("VmSwap", 0) * 1024,
        threads=status.get("Threads", 0),
        sockets=sockets,
        unsent=unsent,
        wchan=_wchan(pid),
        children=tuple(_in_words(child, pid) for child in children[:_MOST_CHILDREN]),
    )


def cpu(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICK if fields is not None else 0.0


def switches(pid: int) -> int:
    """Return how often the main thread has gone to sleep."""
    return _status(pid).get("voluntary_ctxt_switches", 0)


def host_memory() -> tuple[int, int]:
    """Return the memory of this host and how much of it is available, in bytes."""
    fields = dict(_fields("/proc/meminfo"))
    return fields.get("MemTotal", 0) * 1024, fields.get("MemAvailable", 0) * 1024


def name(pid: int, parent: int) -> str:
    """Return the command line of a process or, for a fork with the same one as its parent, its name."""
    line = _command(pid)
    if line and line != _command(parent):
        return line
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", errors="replace") as file:
        return file.read().strip()
    return ""


def _in_words(pid: int, parent: int) -> str:
    fields = _stat(pid)
    return f"{pid} {fields[0].decode() if fields else 'X'} {name(pid, parent)}"


def _command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read(4096).replace(b"\0", b" ").decode(errors="replace").strip()[:_LONGEST]
    return ""


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat after the name; the state is the first."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > 21 else None


def _delayed(pid: int) -> float:
    """Return how long the main thread was runnable but had no core, as happens on a busy host."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/task/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _io(pid: int) -> tuple[int, int]:
    fields = dict(_fields(f"/proc/{pid}/io"))
    return fields.get("rchar", 0), fields.get("wchar", 0)


def _status(pid: int) -> dict[str, int]:
    return dict(_fields(f"/proc/{pid}/status"))


def _fields(path: str) -> Iterator[tuple[str, int]]:
    """Yield the lines "Name:  number kB" of a file in /proc."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:  # the name may end within a character
        for line in file:
            key, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                yield key, int(words[0])


def _swaps() -> int:
    pages = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith(("pswpin ", "pswpout ")):
                pages += int(line.split()[1])
    return pages


def _wchan(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        found = file.read().strip()
        return "" if found == "0" else found
    return ""


def _connections(pid: int) -> tuple[int, int]:
    """Return the number of TCP connections of a process and their unsent bytes. The tables list the whole namespace."""
    own: set[str] = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    own.add(target[8:-1])
    count = unsent = 0
    for table in ("tcp", "tcp6") if own else ():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/net/{table}") as file:
            for line in file:
                row = line.split()
                if len(row) > 9 and row[3] == _ESTABLISHED and row[9] in own:
                    count += 1
                    unsent += int(row[4].partition(":")[0], 16)
    return count, unsent
