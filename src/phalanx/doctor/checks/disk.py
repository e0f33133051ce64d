"""Checks whether the directory of runs is writable and has free space."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.doctor.finding import Finding
from phalanx.doctor.quantity import size

CHECK = "disk"
_LITTLE = 100 * 10**6
_NOTHING = 10**6
_FEW = 0.01
_PROBE = 1 << 16


@dataclass(frozen=True)
class Disk:
    """Free space of the file system of a directory."""

    folder: str  # as requested
    existing: str = ""  # the part of the path that exists
    trouble: str = ""  # why writing fails
    total: int = 0
    free: int = 0
    inodes: int = 0  # 0: the file system does not count inodes
    free_inodes: int = 0


def read(folder: str) -> Disk:
    """Return the facts about the disk of `folder`."""
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    try:
        stat = os.statvfs(existing)
    except OSError as error:
        return Disk(folder, existing, error.strerror or str(error))
    return Disk(
        folder=folder,
        existing=existing,
        trouble=_write(existing),
        total=stat.f_blocks * stat.f_frsize,
        free=stat.f_bavail * stat.f_frsize,
        inodes=stat.f_files,
        free_inodes=stat.f_favail,
    )


def _write(folder: str) -> str:
    """Write to an unnamed file and return the error, or an empty string. Only a write reveals a quota."""
    if not os.path.isdir(folder):
        return "it is not a folder"
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if os.access(folder, os.W_OK | os.X_OK):
            return ""  # the file system has no unnamed files, e.g. NFS
        return error.strerror or str(error)
    try:
        os.write(file, bytes(_PROBE))
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(file)
    return ""


def judge(disk: Disk) -> list[Finding]:
    """Return findings about a disk."""
    elsewhere = "set PHALANX_HOME to a folder on another disk"
    where = disk.folder if disk.existing == os.path.abspath(disk.folder) else f"{disk.folder} (in {disk.existing})"
    room = f"{size(disk.free)} free of {size(disk.total)}"
    if disk.total and disk.free < _NOTHING:
        return [Finding(CHECK, "red", f"the disk of {where} is full: {room}", "", f"free some, or {elsewhere}")]
    if disk.inodes and not disk.free_inodes:
        return [
            Finding(
                CHECK,
                "red",
                f"the disk of {where} has no free inodes: all {disk.inodes} are in use (but {size(disk.free)} free)",
                "many small files",
                f"remove some, or {elsewhere}",
            )
        ]
    if disk.trouble:
        return [
            Finding(
                CHECK,
                "red",
                f"{where} cannot be written: {disk.trouble}",
                "the folder of runs, where every rank's output goes",
                "set PHALANX_HOME to a folder that can be written",
            )
        ]
    found: list[Finding] = []
    if disk.total and disk.free < _LITTLE:
        found.append(Finding(CHECK, "yellow", f"the disk of {where} is almost full: {room}", "", elsewhere))
    if disk.inodes and disk.free_inodes < _FEW * disk.inodes:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"the disk of {where} has only {disk.free_inodes} free inodes of {disk.inodes}",
                "many small files",
                f"remove some, or {elsewhere}",
            )
        )
    return found or [Finding(CHECK, "green", f"{where}: {room}")]
