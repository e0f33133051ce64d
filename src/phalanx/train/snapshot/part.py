"""One rank's part of a snapshot in memory: a seal, the tensors, and a table of them.

The seal says where the table is. It is broken before the first byte is written and made after the last one, so a part
with a seal is complete. Checksums show whether it was changed since.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint import loading
from phalanx.train.checkpoint.format import integrity
from phalanx.train.checkpoint.format.buffer import Buffer, Placed
from phalanx.train.checkpoint.format.manifest import Piece, Table
from phalanx.train.checkpoint.saver import piece_of
from phalanx.train.checkpoint.shares import Chunk

HEAD = 64  # bytes for the seal
_SEAL = struct.Struct("<8sQQI")
_MAGIC = b"phalanx1"
_POPULATE_WRITE = 23  # of <sys/mman.h>; Python has no name for it
_STRETCH = 16 << 20  # bytes per call, which holds the GIL


class Part(msgspec.Struct, frozen=True):
    """The table of a part: everything except the tensors."""

    step: int
    era: str  # one per process group: parts of different eras do not belong together, even of the same step
    rank: int  # of the writer
    together: tuple[int, ...]  # the ranks whose parts make a complete snapshot
    extra: dict[str, Any]
    plain: dict[str, Any] | None  # all values that are not tensors; stored by the first of `together`
    random: dict[str, Any] = {}
    pieces: list[Piece] = []
    sharded: tuple[str, ...] = ()  # names of the objects of which the writer has shards

    def table(self, file: str, size: int) -> Table:
        """Return the table in the form of a checkpoint file."""
        return Table(self.rank, file, size, 0, 0, self.pieces, self.random)


class Seal(msgspec.Struct, frozen=True):
    """Where the table of a complete part is, and its checksum."""

    begin: int  # of the table
    length: int
    checksum: int

    @property
    def end(self) -> int:
        """Where the table ends."""
        return self.begin + self.length


class Writer:
    """Writes parts to the same memory repeatedly. `lend(size)` returns a descriptor of at least that size."""

    def __init__(self, lend: Callable[[int], int]) -> None:
        self._lend = lend
        self._fd: int | None = None
        self.abandoned = False  # `finish` need not complete
        self._buffer = Buffer(self._make, HEAD)

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Allocate memory for chunks like these."""
        self._buffer.prepare(chunks)

    def take(self, chunks: Sequence[Chunk], *, overlap: bool = False) -> list[Placed]:
        """Copy the chunks; `finish` creates a part from them. `overlap`: leave shards to `start` and `copy`."""
        if self._fd is None:
            self._fd = self._lend(HEAD)
        break_seal(self._fd)
        return self._buffer.take(chunks, overlap=overlap)

    def start(self) -> None:
        """Start to copy the shards that are on a GPU, in a separate stream."""
        self._buffer.start_copies()

    def copy(self) -> None:
        """Copy the shards that are on the CPU, and wait for those of `start`. Called in a thread."""
        self._buffer.copy_rest()
        self._buffer.ready()

    @property
    def sealed(self) -> bool:
        """Whether the memory has a complete part."""
        return self._fd is not None and read_seal(self._fd) is not None

    def finish(self, part: Part, placed: Sequence[Placed]) -> None:
        """Compute checksums, write the table and make the seal."""
        if self._fd is None:
            return
        self._buffer.ready()
        pieces = []
        for item in placed:
            if self.abandoned:
                return
            checksum = integrity.checksum(self._buffer.view(item.begin, item.end))
            pieces.append(piece_of(item.chunk, item.begin, item.end, checksum))
        table = msgspec.json.encode(msgspec.structs.replace(part, pieces=pieces))
        begin = max((item.end for item in placed), default=HEAD)
        _write(self._fd, table, begin)
        make_seal(self._fd, Seal(begin, len(table), integrity.checksum(table)))

    def close(self) -> None:
        """Unmap the memory; the agent keeps it."""
        self._buffer.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _make(self, size: int) -> mmap.mmap:
        fd = self._lend(size)
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd
        # Allocate all pages now, in parallel to the training: page faults during the copy take several times as long.
        os.posix_fallocate(fd, 0, size)
        memory = mmap.mmap(fd, size)
        with contextlib.suppress(OSError):  # an older kernel
            for begin in range(0, size, _STRETCH):
                memory.madvise(_POPULATE_WRITE, begin, min(_STRETCH, size - begin))
        return memory


def break_seal(fd: int) -> None:
    """Mark a part as incomplete."""
    os.pwrite(fd, bytes(HEAD), 0)


def make_seal(fd: int, made: Seal) -> None:
    """Mark a part as complete."""
    os.pwrite(fd, _SEAL.pack(_MAGIC, made.begin, made.length, made.checksum), 0)


def read_seal(fd: int) -> Seal | None:
    """Return the seal of a part; None: it is incomplete."""
    head = os.pread(fd, _SEAL.size, 0)
    if len(head) < _SEAL.size:
        return None
    magic, begin, length, checksum = _SEAL.unpack(head)
    found = Seal(begin, length, checksum)
    return found if magic == _MAGIC and found.end <= os.fstat(fd).st_size else None


def read(fd: int) -> Part | None:
    """Return the table of a part; None: it is incomplete, or the table was changed."""
    found = read_seal(fd)
    if found is None:
        return None
    table = os.pread(fd, found.length, found.begin)
    if integrity.checksum(table) != found.checksum:
        return None
    try:
        return msgspec.json.decode(table, type=Part)
    except msgspec.MsgspecError:
        return None


def differences(fd: int) -> list[str]:
    """Return what was changed since a part was written. Reads all of it."""
    part = read(fd)
    if part is None:
        return ["its table was changed"]
    return loading.differences(loading.DESCRIPTORS, [part.table(str(fd), os.fstat(fd).st_size)])


def body(fd: int, size: int) -> torch.Tensor:
    """Return the bytes after the seal, up to `size`, without a copy."""
    whole = torch.frombuffer(mmap.mmap(fd, max(size, HEAD)), dtype=torch.uint8)
    return whole[HEAD:size]


def _write(fd: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, place)
        if not written:
            raise CheckpointError("the memory for a snapshot is too small")
        view, place = view[written:], place + written
