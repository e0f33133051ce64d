"""Memory without a name (a memfd) that one process of a run creates and others open through /proc.

    fd = shared_memory.create("phalanx", size)
    fd = shared_memory.open_of(pid, number, "phalanx", size=size)       # in another process

The store or another rank says which memory to open. They are not trusted: only memory of this user is opened, which
phalanx has created and whose size cannot change. A map of a file that shrinks ends a process with SIGBUS.
"""

from __future__ import annotations

import fcntl
import os

FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
GROWING = fcntl.F_SEAL_SHRINK  # for memory that is lent again with a larger size


class ForeignMemoryError(OSError):
    """The file to open is not memory that a process of this user has created for this purpose."""


def create(name: str, size: int, seals: int = FIXED) -> int:
    """Return the descriptor of a new memory of this size."""
    fd = create_unsealed(name)
    try:
        os.ftruncate(fd, size)
        seal(fd, seals)
    except BaseException:  # also KeyboardInterrupt: the descriptor must not leak
        os.close(fd)
        raise
    return fd


def create_unsealed(name: str) -> int:
    """Return the descriptor of a new, empty memory. No other process opens it before `seal` is called."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int, seals: int = FIXED) -> None:
    """Fix the size of a memory."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def open_of(pid: int, number: int, name: str, *, size: int | None = None, inode: int | None = None) -> int:
    """Open the memory that is descriptor `number` of process `pid`; return a descriptor to read and write.

    Raises FileNotFoundError if the process or its descriptor no longer exists, and ForeignMemoryError for anything but
    memory of this user with this name, size and inode.
    """
    path = f"/proc/{pid}/fd/{number}"
    _check_name(path, name)  # before opening it: a pipe without a reader would block, and a device may do anything
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_name(f"/proc/self/fd/{fd}", name)
        check(fd)
        found = os.fstat(fd)
        if size not in (None, found.st_size) or inode not in (None, found.st_ino):
            raise ForeignMemoryError(f"it is another memory of process {pid}: it has {found.st_size} bytes")
    except BaseException:
        os.close(fd)
        raise
    return fd


def check(fd: int, seals: int = FIXED) -> None:
    """Raise ForeignMemoryError if a memory belongs to another user, or if it lacks one of the seals."""
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        raise ForeignMemoryError(f"it belongs to user {owner}, and this process runs as user {os.geteuid()}")
    try:
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ForeignMemoryError("it is not a memfd") from None
    if found & seals != seals:
        raise ForeignMemoryError("its size can change: it is not sealed")


def _check_name(path: str, name: str) -> None:
    found = os.readlink(path)
    if found != f"/memfd:{name} (deleted)":
        raise ForeignMemoryError(f"it is {found}, and not memory of phalanx")
