"""Checks the files of a checkpoint, and reads the parts that this rank needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from phalanx.contract.regular_file import open_regular, read_regular
from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.format import integrity, tensorfile
from phalanx.train.checkpoint.format.folder import Info
from phalanx.train.checkpoint.format.manifest import STATE, Manifest, Piece, Table, Values, table_file
from phalanx.train.checkpoint.format.plain import Tensors
from phalanx.train.checkpoint.format.validation import check_tables, check_values
from phalanx.train.checkpoint.state import Shape

DESCRIPTORS = "/proc/self/fd"  # the folder of a snapshot: a memfd has no other name


@dataclass(frozen=True)
class Contents:
    """A checkpoint without its tensors."""

    info: Info
    values: Values
    tables: list[Table]

    @property
    def path(self) -> str:
        """The folder of the checkpoint."""
        return self.info.path

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of its tensors, by name."""
        return shapes(self.tables)


def shapes(tables: Sequence[Table]) -> dict[str, Shape]:
    """Return the shapes of all tensors in these tables, by name."""
    return {
        piece.name: Shape(tensorfile.dtype_of(piece.dtype), tuple(piece.shape))
        for table in tables
        for piece in table.pieces
    }


def contents(info: Info, manifest: Manifest, *, signed: bool = False) -> Contents:
    """Read the contents, and compare each file with the manifest. `signed`: also by its digest."""
    name = info.name
    read = {}
    for entry in manifest.files:
        if entry.checksum is None:
            continue
        data = read_regular(os.path.join(info.path, entry.name))
        if integrity.checksum(data) != entry.checksum:
            found = f"checksum is {integrity.checksum(data):08x}, {entry.checksum:08x} was written"
            raise CheckpointError(f"{name}/{entry.name}: {found}")
        if signed and integrity.digest(data) != entry.digest:
            raise CheckpointError(f"{name}/{entry.name}: is not the file that was signed")
        read[entry.name] = data
    tables = [
        integrity.opened(read[table_file(rank)], Table, f"{name}/{table_file(rank)}")
        for rank in range(manifest.world_size)
    ]
    values = integrity.opened(read[STATE], Values, f"{name}/{STATE}")
    try:
        check_tables(manifest, tables)
        check_values(values.plain, values.extra, tables)
    except CheckpointError as error:
        raise CheckpointError(f"{name}/{error.what}") from None
    return Contents(info, values, tables)


def differences(path: str, tables: Sequence[Table], *, signed: bool = False) -> list[str]:
    """Return the changes in these files of tensors since they were written. Reads all of them.

    `signed`: also compare their digests, which cannot be forged.
    """
    found = []
    for table in tables:
        where = f"{os.path.basename(path)}/{table.file}"
        try:
            with _TensorFile(path, table) as file:
                if file.checksum(0, table.header) != table.header_checksum:
                    found.append(f"{where}: the header was changed")
                found += [
                    f"{where}: {piece.name}: checksum is {seen:08x}, {piece.checksum:08x} was written"
                    for piece in table.pieces
                    if (seen := file.checksum(piece.begin, piece.end)) != piece.checksum
                ]
                if signed and file.digest(table.size) != table.digest:
                    found.append(f"{where}: is not the file that was signed")
        except OSError as error:
            found.append(f"{where}: {error.strerror}")
        except CheckpointError as error:
            found.append(error.what)
    return found


def read(contents: Contents, targets: Tensors) -> None:
    """Read the tensors of these names into the targets, which may be whole or sharded in any way."""
    planner, planned = _planned(contents.tables, targets)
    with torch.no_grad():
        for table, items in planned:
            with _TensorFile(contents.path, table) as file:
                for piece, item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(file.box(piece, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)


def needed(tables: Sequence[Table], targets: Tensors) -> list[int]:
    """Return the ranks that have written data that these targets need."""
    return [table.rank for table, _ in _planned(tables, targets)[1]]


def _planned(
    tables: Sequence[Table], targets: Tensors
) -> tuple[DefaultLoadPlanner, list[tuple[Table, list[tuple[Piece, ReadItem]]]]]:
    """Return the parts to read from each file."""
    files = {(piece.name, tuple(piece.offsets)): (table, piece) for table in tables for piece in table.pieces}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), _metadata(tables), False)
    planned: dict[int, tuple[Table, list[tuple[Piece, ReadItem]]]] = {}
    for item in planner.create_local_plan().items:
        table, piece = files[item.storage_index.fqn, tuple(item.storage_index.offset)]
        planned.setdefault(table.rank, (table, []))[1].append((piece, item))
    return planner, list(planned.values())


def _metadata(tables: Sequence[Table]) -> Metadata:
    """Return the metadata for the planner of DCP."""
    found: dict[str, TensorStorageMetadata] = {}
    places = {}
    for table in tables:
        for piece in table.pieces:
            tensor = found.setdefault(
                piece.name,
                TensorStorageMetadata(
                    TensorProperties(dtype=tensorfile.dtype_of(piece.dtype)), torch.Size(piece.shape), []
                ),
            )
            places[MetadataIndex(piece.name, piece.offsets)] = table.file
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
    return Metadata(found, storage_data=places)


class _TensorFile:
    """A file of tensors. It is read, not mapped: an I/O error of a mapped file would be a SIGBUS."""

    def __init__(self, path: str, table: Table) -> None:
        self._name = f"{os.path.basename(path)}/{table.file}"
        file = os.path.join(path, table.file)
        # The kernel shows the memory of a snapshot as a link.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if path == DESCRIPTORS else open_regular(file)
        self._file = open(fd, "rb", buffering=0)  # noqa: SIM115
        self._scratch = memoryview(bytearray(integrity.PIECE))
        size = os.fstat(self._file.fileno()).st_size
        if size != table.size:
            self._file.close()
            raise CheckpointError(f"{self._name}: has {size:,} bytes, {table.size:,} were written")

    def __enter__(self) -> _TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def checksum(self, begin: int, end: int) -> int:
        found = 0
        for place in range(begin, end, integrity.PIECE):
            part = self._scratch[: min(integrity.PIECE, end - place)]
            self._fill(part, place)
            found = integrity.checksum(part, found)
        return found

    def digest(self, size: int) -> str:
        found = hashlib.sha256()
        for place in range(0, size, integrity.PIECE):
            part = self._scratch[: min(integrity.PIECE, size - place)]
            self._fill(part, place)
            found.update(part)
        return found.hexdigest()

    def box(self, piece: Piece, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return a box of a piece. Only its rows are read: a rank needs few rows of a sharded tensor."""
        dtype = tensorfile.dtype_of(piece.dtype)
        sizes, begin, end = list(piece.sizes), piece.begin, piece.end
        if sizes and sizes[0]:
            row = (end - begin) // sizes[0]
            sizes[0] = lengths[0]
            begin += offsets[0] * row
            end = begin + lengths[0] * row
        if begin == end:
            return torch.empty(sizes, dtype=dtype)
        data = bytearray(end - begin)
        self._fill(memoryview(data), begin)
        box = torch.frombuffer(data, dtype=dtype).view(sizes)
        for axis in range(1, len(sizes)):
            box = box.narrow(axis, offsets[axis], lengths[axis])
        return box

    def _fill(self, memory: memoryview, place: int) -> None:
        self._file.seek(place)
        while len(memory):
            got = self._file.readinto(memory[: integrity.PIECE])
            if not got:
                raise CheckpointError(f"{self._name}: is truncated")
            memory = memory[got:]
