"""Checksums and signatures, JSON with them, and durable writes."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import zlib
from typing import Any, TypeVar

import msgspec

from phalanx.errors import CheckpointError

T = TypeVar("T")
PIECE = 8 << 20  # bytes per call: long enough to be fast, short enough to release the GIL often

# crc32 detects errors of disks and networks, not manipulation, and is the fastest checksum in the standard library.
# Nothing in a checkpoint is ever executed. --checkpoint-key detects manipulation, too: the manifest has an HMAC
# and the SHA-256 of each table, which has that of its file of tensors.


def checksum(data: memoryview | bytes, start: int = 0) -> int:
    """Return the crc32 of the data."""
    view = memoryview(data)
    for begin in range(0, len(view), PIECE):
        start = zlib.crc32(view[begin : begin + PIECE], start)
    return start


class _Sealed(msgspec.Struct, omit_defaults=True):
    checksum: int
    body: msgspec.Raw
    signature: str = ""  # empty: no key


def digest(data: bytes) -> str:
    """Return the SHA-256 of the data, for files that a signature covers."""
    return hashlib.sha256(data).hexdigest()


def sealed(body: Any, key: bytes = b"") -> bytes:
    """Return the body as JSON with its checksum, and with a signature if there is a key."""
    raw = msgspec.json.encode(body)
    signature = _signature(key, type(body), raw) if key else ""
    return msgspec.json.encode(_Sealed(checksum(raw), msgspec.Raw(raw), signature)) + b"\n"


def _signature(key: bytes, kind: type, raw: bytes) -> str:
    # The kind is signed too: data signed as a table is not accepted as a manifest.
    return hmac.new(key, b"phalanx checkpoint\0" + kind.__name__.encode() + b"\0" + raw, "sha256").hexdigest()


def opened(data: bytes, kind: type[T], name: str, key: bytes = b"") -> T:
    """Return the body; raise CheckpointError, with the name of the file, if the checksum is wrong.

    With a key, a signature that is missing or wrong is an error, too.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Sealed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{name}: {len(data)} bytes, not JSON with a checksum: {error}") from None
    raw = bytes(envelope.body)
    if key and not envelope.signature:
        raise CheckpointError(f"{name}: is not signed, and --checkpoint-key accepts signed checkpoints only")
    if key and not hmac.compare_digest(_signature(key, kind, raw).encode(), envelope.signature.encode()):
        raise CheckpointError(f"{name}: wrong signature: it was signed with another key, or changed afterwards")
    if checksum(raw) != envelope.checksum:
        raise CheckpointError(f"{name}: checksum is {checksum(raw):08x}, {envelope.checksum:08x} was written")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{name}: unknown format: {error}") from None


def write_durably(path: str, data: bytes) -> None:
    """Write a file atomically, even in case of a power failure."""
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
