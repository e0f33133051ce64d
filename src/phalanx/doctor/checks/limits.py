"""The limits of open files, processes and locked memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from phalanx.doctor.finding import Finding
from phalanx.doctor.quantity import size

CHECK = "limits"
_FILES = 1024  # the default of every distribution
_FILES_A_RANK = 16  # pipes, log files and sockets that the agent holds per rank, with a margin
_FILES_AT_ALL = 64
_TASKS = 512  # enough for a few ranks and the threads that torch starts in each


@dataclass(frozen=True)
class Limits:
    """Soft and hard limits; None: unlimited."""

    files: int | None
    files_hard: int | None
    locked: int | None  # bytes
    tasks: int | None  # processes and threads of this user; root has no limit
    group_tasks: int | None = None  # how many more the control group allows
    rdma: tuple[str, ...] = ()  # InfiniBand or RoCE cards, which need locked memory


def read(root: str = "/") -> Limits:
    """Read the resource limits of this process."""
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return Limits(
        files=_none(files),
        files_hard=_none(files_hard),
        locked=_none(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        tasks=None if os.geteuid() == 0 else _none(tasks),
        group_tasks=_group_tasks(Path(root)),
        rdma=tuple(sorted(path.name for path in Path(root, "sys/class/infiniband").glob("*"))),
    )


def _group_tasks(root: Path) -> int | None:
    """Return the lowest remaining task limit of all parent cgroups, version 2 or 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    least: int | None = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        tree = root / "sys/fs/cgroup" / controllers
        group = tree / path.lstrip("/")
        while group != tree:
            try:
                left = int((group / "pids.max").read_text()) - int((group / "pids.current").read_text())
                least = left if least is None else min(least, left)
            except (OSError, ValueError):
                pass  # no limit here
            group = group.parent
    return least


def _none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def judge(limits: Limits, *, ranks: int = 0) -> list[Finding]:
    """Return findings about the limits. `ranks`: number of ranks on this machine."""
    found: list[Finding] = []
    needed = max(_FILES, _FILES_AT_ALL + _FILES_A_RANK * ranks)
    if limits.files is not None and limits.files < needed:
        hopeless = limits.files < _FILES_AT_ALL + _FILES_A_RANK * ranks
        hard = limits.files_hard
        enough = hard is None or hard >= needed
        found.append(
            Finding(
                CHECK,
                "red" if hopeless else "yellow",
                f"a process may open {limits.files} files; {needed} are needed"
                + (f" for {ranks} ranks" if ranks and needed > _FILES else ""),
                "the limit of this shell (ulimit -n)" if enough else f"the hard limit of this login is {hard}",
                f"ulimit -n {needed}" if enough else "raise nofile in /etc/security/limits.conf, and log in again",
            )
        )
    if limits.tasks is not None and limits.tasks < _TASKS:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"this user may have {limits.tasks} processes and threads",
                "torch starts several threads in every rank",
                f"ulimit -u {_TASKS * 8}",
            )
        )
    if limits.group_tasks is not None and limits.group_tasks < _TASKS:
        found.append(
            Finding(
                CHECK,
                "red" if limits.group_tasks < 16 else "yellow",
                f"the control group lets {limits.group_tasks} more processes and threads start",
                "a limit of the container, the service or the job (pids.max)",
                "docker run --pids-limit=-1 …   (or TasksMax= of the service)",
            )
        )
    if limits.rdma and limits.locked is not None:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"a process may lock {size(limits.locked)} of memory; there are RDMA cards: {', '.join(limits.rdma)}",
                "NCCL over InfiniBand or RoCE registers its buffers, and fails where they cannot be locked",
                "ulimit -l unlimited   (docker run --ulimit memlock=-1 …)",
            )
        )
    if not found:
        files = "any number of" if limits.files is None else limits.files
        locked = "any amount" if limits.locked is None else size(limits.locked)
        found.append(Finding(CHECK, "green", f"{files} open files, {locked} of locked memory"))
    return found
