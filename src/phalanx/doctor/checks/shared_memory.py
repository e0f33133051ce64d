"""The size of /dev/shm, through which data loaders and NCCL pass data between processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.doctor.finding import Finding
from phalanx.doctor.quantity import size

CHECK = "shared memory"
_PLACE = "/dev/shm"  # noqa: S108 - phalanx creates no files here
_SMALL = 64 << 20  # docker's default: enough for a few ranks, too small for data loaders
_LITTLE = 16 << 20
_USELESS = 1 << 20


@dataclass(frozen=True)
class SharedMemory:
    """Size and free space of /dev/shm."""

    total: int = 0
    free: int = 0
    trouble: str = ""
    path: str = _PLACE


def read(path: str = _PLACE) -> SharedMemory:
    """Read the size of /dev/shm."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return SharedMemory(trouble=error.strerror or str(error), path=path)
    trouble = "" if os.access(path, os.W_OK | os.X_OK) else "it cannot be written"
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, trouble, path)


def judge(memory: SharedMemory, *, brief: bool = False) -> list[Finding]:
    """Return findings about /dev/shm. `brief`: omit the hint about the default size in containers."""
    path = memory.path
    enlarge = f"docker run --shm-size=8g … or --ipc=host   (a machine's own: mount -o remount,size=8G {path})"
    if memory.trouble:
        return [
            Finding(
                CHECK,
                "red",
                f"{path} cannot be used: {memory.trouble}",
                "data loaders with workers, and NCCL between GPUs of a machine, need it",
                f"mount -t tmpfs -o mode=1777 tmpfs {path}",
            )
        ]
    if memory.free < _USELESS:
        return [
            Finding(
                CHECK,
                "red",
                f"{path} is full: {size(memory.free)} of {size(memory.total)} free",
                "files that killed jobs left there, or a size too small",
                f"ls -l {path}; remove what no process uses, or {enlarge}",
            )
        ]
    small = memory.total < _SMALL or (memory.total == _SMALL and not brief)
    if small or memory.free < _LITTLE:
        return [
            Finding(
                CHECK,
                "yellow",
                f"{path} has {size(memory.free)} free of {size(memory.total)}",
                "a container's default size" if small else "files that jobs hold there, or that killed jobs left",
                enlarge if small else f"ls -l {path}; remove what no process uses",
            )
        ]
    return [Finding(CHECK, "green", f"{size(memory.free)} free of {size(memory.total)} in {path}")]
