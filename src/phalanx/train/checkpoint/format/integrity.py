"""Checksums, JSON with a checksum, and durable writes."""

from __future__ import annotations

import errno
import os
import zlib
from typing import Any, TypeVar

import msgspec

from phalanx.errors import CheckpointError

T = TypeVar("T")
PIECE = 8 << 20  # bytes per call: long enough to be fast, short enough to release the GIL often

# crc32 detects errors of disks and networks, not manipulation, and is the fastest checksum in the standard library.
# Nothing in a checkpoint is ever executed.


def checksum(data: memoryview | bytes, start: int = 0) -> int:
    """Return the crc32 of the data."""
    view = memoryview(data)
    for begin in range(0, len(view), PIECE):
        start = zlib.crc32(view[begin : begin + PIECE], start)
    return start


class _Sealed(msgspec.Struct):
    checksum: int
    body: msgspec.Raw


def sealed(body: Any) -> bytes:
    """Return the body as JSON with its checksum."""
    raw = msgspec.json.encode(body)
    return msgspec.json.encode(_Sealed(checksum(raw), msgspec.Raw(raw))) + b"\n"


def opened(data: bytes, kind: type[T], name: str) -> T:
    """Return the body; raise CheckpointError, with the name of the file, if the checksum is wrong."""
    try:
        envelope = msgspec.json.decode(data, type=_Sealed)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{name}: {len(data)} bytes, not JSON with a checksum: {error}") from None
    raw = bytes(envelope.body)
    if checksum(raw) != envelope.checksum:
        raise CheckpointError(f"{name}: checksum is {checksum(raw):08x}, {envelope.checksum:08x} was written")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{name}: unknown format: {error}") from None


def write_durably(path: str, data: bytes) -> None:
    """Write a file atomically, also with regard to a power cut."""
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
    """Write all of the data."""
    while len(data):
        data = data[os.write(fd, data[:PIECE]) :]


def sync_folder(path: str) -> None:
    """Make renames in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems do not support fsync of a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
