"""Checksums, JSON that carries its own, and what it takes for bytes to be on the disk."""

from __future__ import annotations

import errno
import os
import zlib
from typing import Any, TypeVar

import msgspec

from phalanx.errors import CheckpointError

T = TypeVar("T")
PIECE = 8 << 20  # bytes a call: long enough to be fast, short enough to let others have the interpreter

# crc32 is there to find what disks and cables do, not what people do, and is the fastest that comes with Python.
# What a checkpoint holds is data whoever wrote it: nothing in it is ever run.


def checksum(data: memoryview | bytes, start: int = 0) -> int:
    view = memoryview(data)
    for begin in range(0, len(view), PIECE):
        start = zlib.crc32(view[begin : begin + PIECE], start)
    return start


class _Sealed(msgspec.Struct):
    checksum: int
    body: msgspec.Raw


def sealed(body: Any) -> bytes:
    """JSON of the body with a checksum of it: what was changed since cannot be opened."""
    raw = msgspec.json.encode(body)
    return msgspec.json.encode(_Sealed(checksum(raw), msgspec.Raw(raw))) + b"\n"


def opened(data: bytes, kind: type[T], name: str) -> T:
    """The body, or a CheckpointError that says what is wrong with the file of this name."""
    try:
        envelope = msgspec.json.decode(data, type=_Sealed)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{name}: {len(data)} bytes, which are no sealed JSON: {error}") from None
    raw = bytes(envelope.body)
    if checksum(raw) != envelope.checksum:
        raise CheckpointError(f"{name}: checksum is {checksum(raw):08x}, {envelope.checksum:08x} was written")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{name}: is of another format: {error}") from None


def write_durably(path: str, data: bytes) -> None:
    """All there or not there under this name, also after a power cut."""
    part = f"{path}.part"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, memoryview(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(part, path)
    sync_folder(os.path.dirname(path))


def write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data[:PIECE]) :]


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems write names through at once and know no such call for a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
