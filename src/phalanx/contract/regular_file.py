"""Opens files of a folder of checkpoints, which another user may have created: no links, no devices, no pipes."""

from __future__ import annotations

import errno
import os
import stat

from phalanx.errors import CheckpointError

MOST_TEXT = 1 << 28  # bytes of a file that is read as a whole


def open_regular(path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file. Raises CheckpointError for anything else; a FIFO does not block."""
    name = f"{os.path.basename(os.path.dirname(path))}/{os.path.basename(path)}"
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO without a reader
            raise CheckpointError(f"{name}: is {kind_of(path)}, not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{name}: is {kind_of(path)}, not a regular file")
    return fd


def read_regular(path: str) -> bytes:
    """Return the content of a regular file of limited size."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_TEXT:
            raise CheckpointError(f"{os.path.basename(path)}: has {size:,} bytes, at most {MOST_TEXT:,} are read")
        return file.read(MOST_TEXT)


def kind_of(path: str) -> str:
    """Return the type of a file, for messages."""
    mode = os.lstat(path).st_mode
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")
