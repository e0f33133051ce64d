"""One rank's part of a snapshot, in a memory of its own: a seal, tensors end to end, and a table of them.

The seal says where the table is. It is broken before the first byte is written and made after the last, so whatever has
one is whole; that it is still what was written, checksums say.
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
from phalanx.train.checkpoint import integrity, loading
from phalanx.train.checkpoint.buffer import Buffer, Placed
from phalanx.train.checkpoint.manifest import Piece, Table
from phalanx.train.checkpoint.saver import piece_of
from phalanx.train.checkpoint.shares import Chunk

HEAD = 64  # bytes for the seal
DESCRIPTORS = "/proc/self/fd"  # memories have no other name
_SEAL = struct.Struct("<8sQQI")
_MAGIC = b"phalanx1"
_POPULATE_WRITE = 23  # of <sys/mman.h>; Python has no name for it
_STRETCH = 16 << 20  # bytes a call, for it has Python's lock


class Part(msgspec.Struct, frozen=True):
    """What is in a memory, beside tensors."""

    step: int
    era: str  # one life of the group: parts of different ones do not belong together, though the step be the same
    rank: int  # that wrote it
    together: tuple[int, ...]  # the ranks whose parts are the whole
    extra: dict[str, Any]
    plain: dict[str, Any] | None  # all that is no tensor; the first of `together` has it
    random: dict[str, Any] = {}
    pieces: list[Piece] = []

    def table(self, file: str, size: int) -> Table:
        """As if it were a file of a checkpoint."""
        return Table(self.rank, file, size, 0, 0, self.pieces, self.random)


class Seal(msgspec.Struct, frozen=True):
    begin: int  # of the table
    length: int
    checksum: int

    @property
    def end(self) -> int:
        return self.begin + self.length


class Writer:
    """A memory to write, again and again. `lend` gives a descriptor of one that has at least so many bytes."""

    def __init__(self, lend: Callable[[int], int]) -> None:
        self._lend = lend
        self._fd: int | None = None
        self.abandoned = False  # nobody waits for what is being finished
        self._buffer = Buffer(self._make, HEAD)

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Memory for chunks like these."""
        self._buffer.prepare(chunks)

    def take(self, chunks: Sequence[Chunk], *, overlap: bool = False) -> list[Placed]:
        """Copy everything in; `finish` makes a part of it. `overlap`: all but shards; `start` and `copy` do these."""
        if self._fd is None:
            self._fd = self._lend(HEAD)
        break_seal(self._fd)
        return self._buffer.take(chunks, overlap=overlap)

    def start(self) -> None:
        """Copy the shards that are on a GPU, beside what it is asked for next."""
        self._buffer.start_copies()

    def copy(self) -> None:
        """Copy the shards that are on the CPU; in a thread beside the training. Waits for those of `start`."""
        self._buffer.copy_rest()
        self._buffer.ready()

    @property
    def sealed(self) -> bool:
        return self._fd is not None and read_seal(self._fd) is not None

    def finish(self, part: Part, placed: Sequence[Placed]) -> None:
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
        self._buffer.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _make(self, size: int) -> mmap.mmap:
        fd = self._lend(size)
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd
        # All of it now, beside the training: page by page, while it is first written, takes several times as long.
        os.posix_fallocate(fd, 0, size)
        memory = mmap.mmap(fd, size)
        with contextlib.suppress(OSError):  # an older kernel
            for begin in range(0, size, _STRETCH):
                memory.madvise(_POPULATE_WRITE, begin, min(_STRETCH, size - begin))
        return memory


def break_seal(fd: int) -> None:
    os.pwrite(fd, bytes(HEAD), 0)


def make_seal(fd: int, made: Seal) -> None:
    os.pwrite(fd, _SEAL.pack(_MAGIC, made.begin, made.length, made.checksum), 0)


def read_seal(fd: int) -> Seal | None:
    """None: nobody has finished it."""
    head = os.pread(fd, _SEAL.size, 0)
    if len(head) < _SEAL.size:
        return None
    magic, begin, length, checksum = _SEAL.unpack(head)
    found = Seal(begin, length, checksum)
    return found if magic == _MAGIC and found.end <= os.fstat(fd).st_size else None


def read(fd: int) -> Part | None:
    """None: there is none, or its table is not what was written."""
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
    """What in it is not what was written. Reads all of it."""
    part = read(fd)
    if part is None:
        return ["its table is not what was written"]
    return loading.differences(DESCRIPTORS, [part.table(str(fd), os.fstat(fd).st_size)])


def body(fd: int, size: int) -> torch.Tensor:
    """The bytes behind the seal, up to `size`: of the memory itself, to send from or to receive into."""
    whole = torch.frombuffer(mmap.mmap(fd, max(size, HEAD)), dtype=torch.uint8)
    return whole[HEAD:size]


def _write(fd: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, place)
        if not written:
            raise CheckpointError("memory for a snapshot ends before its time")
        view, place = view[written:], place + written
