"""Processes that a dead rank leaves behind: data workers, servers, sidecars.

Its replacement needs their ports and memory, so they are ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from phalanx.contract.variables import RUN

logger = logging.getLogger(__name__)


class ProcessRow(NamedTuple):
    """A live process in /proc."""

    pid: int
    parent: int
    session: int


def kill(worker: int, local_rank: int, *, run: str, living: Collection[int], reapers: Collection[int]) -> list[int]:
    """Kill the leftover processes of the dead worker with this pid; return their pids.

    living   pids of the other workers: their processes are not touched. 0, here too: it has not started yet
    reapers  pids of the agent and of its fork server, which become the parents of orphans
    """
    found = orphans_of(
        processes(),
        worker,
        living={*living},
        reapers={*reapers},
        is_own=lambda pid: is_of(environ_of(pid), run, local_rank),
    )
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    if found:
        logger.debug("killed %s, which the worker %d left behind", found, worker)
    return found


def orphans_of(
    table: Mapping[int, ProcessRow],
    worker: int,
    *,
    living: set[int],
    reapers: set[int],
    is_own: Callable[[int], bool],
) -> list[int]:
    """Return the processes that the dead worker has started, and their descendants.

    They are in its session, or its children, or orphans with its environment (`is_own`): its children have another
    parent once the kernel has freed all its resources.
    """
    if not worker:  # it never started; 0 is the parent of init, and of the kernel's threads
        return []
    living = living - {0}  # below 0 is every process
    spared = living | reapers | _below(table, living) | {worker}
    first = {
        row.pid
        for row in table.values()
        if row.pid not in spared
        and (worker in (row.session, row.parent) or (row.parent in reapers and is_own(row.pid)))
    }
    return sorted(first | _below(table, first) - spared)


def _below(table: Mapping[int, ProcessRow], roots: set[int]) -> set[int]:
    """Return the processes below `roots`."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    found: set[int] = set()
    level = [*roots]
    while level:
        level = [pid for parent in level for pid in children.get(parent, []) if pid not in found]
        found.update(level)
    return found


def processes() -> dict[int, ProcessRow]:
    """Return all live processes of this machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    found[int(name)] = ProcessRow(int(name), int(fields[1]), int(fields[3]))
    return found


def environ_of(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
        return {name: value for name, _, value in pairs}
    return {}


def is_of(environ: Mapping[bytes, bytes], run: str, local_rank: int) -> bool:
    """Return whether an environment is that of a rank of this run."""
    return environ.get(RUN.encode()) == run.encode() and environ.get(b"LOCAL_RANK") == str(local_rank).encode()
