"""From files back into memory: first whether they are what was written, then the parts that this rank needs."""

from __future__ import annotations

import mmap
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

from phalanx.train.checkpoint import seal, tensorfile
from phalanx.train.checkpoint.fault import CheckpointError
from phalanx.train.checkpoint.manifest import STATE, Manifest, Piece, Table, Values, table_file
from phalanx.train.checkpoint.plain import Tensors
from phalanx.train.checkpoint.state import Shape


@dataclass(frozen=True)
class Contents:
    """All of a checkpoint but its tensors."""

    path: str
    values: Values
    tables: list[Table]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {
            piece.name: Shape(_dtype(piece, table), tuple(piece.shape))
            for table in self.tables
            for piece in table.pieces
        }


def contents(path: str, manifest: Manifest) -> Contents:
    """Read and compared with what the manifest says of each file."""
    name = os.path.basename(path)
    read = {}
    for entry in manifest.files:
        if entry.checksum is None:
            continue
        with open(os.path.join(path, entry.name), "rb") as file:
            data = file.read()
        if seal.checksum(data) != entry.checksum:
            found = f"checksum is {seal.checksum(data):08x}, {entry.checksum:08x} was written"
            raise CheckpointError(f"{name}/{entry.name}: {found}")
        read[entry.name] = data
    for wanted in (STATE, *(table_file(rank) for rank in range(manifest.world_size))):
        if wanted not in read:
            raise CheckpointError(f"{name}/manifest.json: does not name {wanted}")
    tables = [
        seal.opened(read[table_file(rank)], Table, f"{name}/{table_file(rank)}") for rank in range(manifest.world_size)
    ]
    return Contents(path, seal.opened(read[STATE], Values, f"{name}/{STATE}"), tables)


def differences(path: str, tables: Sequence[Table]) -> list[str]:
    """What in these files of tensors is not what was written. Reads all of them."""
    found = []
    for table in tables:
        where = f"{os.path.basename(path)}/{table.file}"
        try:
            with _Mapped(os.path.join(path, table.file), table) as mapped:
                if mapped.checksum(0, table.header) != table.header_checksum:
                    found.append(f"{where}: the header is not what was written")
                found += [
                    f"{where}: {piece.name}: checksum is {seen:08x}, {piece.checksum:08x} was written"
                    for piece in table.pieces
                    if (seen := mapped.checksum(piece.begin, piece.end)) != piece.checksum
                ]
        except (CheckpointError, OSError) as error:
            found.append(f"{where}: {getattr(error, 'strerror', None) or error}")
    return found


def read(contents: Contents, targets: Tensors) -> None:
    """Fill the targets, whole tensors or shards of any layout, with what the checkpoint has under their names."""
    tables = contents.tables
    files = {(piece.name, tuple(piece.offsets)): (table, piece) for table in tables for piece in table.pieces}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), _metadata(tables), False)
    plan = planner.create_local_plan()
    by_file: dict[str, list[tuple[Piece, ReadItem]]] = {}
    owners: dict[str, Table] = {}
    for item in plan.items:
        table, piece = files[item.storage_index.fqn, tuple(item.storage_index.offset)]
        owners[table.file] = table
        by_file.setdefault(table.file, []).append((piece, item))
    with torch.no_grad():
        for name, items in by_file.items():
            with _Mapped(os.path.join(contents.path, name), owners[name]) as mapped:
                for piece, item in items:
                    _copy(mapped, piece, item, planner)


def _copy(mapped: _Mapped, piece: Piece, item: ReadItem, planner: DefaultLoadPlanner) -> None:
    box = mapped.tensor(piece)
    for axis, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        box = box.narrow(axis, begin, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(box)
    planner.commit_tensor(item, target)


def _metadata(tables: Sequence[Table]) -> Metadata:
    """As DCP's planner wants it."""
    found: dict[str, TensorStorageMetadata] = {}
    places = {}
    for table in tables:
        for piece in table.pieces:
            tensor = found.setdefault(
                piece.name,
                TensorStorageMetadata(TensorProperties(dtype=_dtype(piece, table)), torch.Size(piece.shape), []),
            )
            places[MetadataIndex(piece.name, piece.offsets)] = table.file
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
    return Metadata(found, storage_data=places)


def _dtype(piece: Piece, table: Table) -> torch.dtype:
    if piece.dtype not in tensorfile.DTYPES:
        raise CheckpointError(f"{table.file}: {piece.name} is of {piece.dtype}, which this phalanx does not know")
    return tensorfile.DTYPES[piece.dtype]


class _Mapped:
    """A file of tensors in memory, page by page as it is looked at."""

    def __init__(self, path: str, table: Table) -> None:
        self._table = table
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != table.size:
                raise CheckpointError(f"has {size:,} bytes, {table.size:,} were written")
            # Private pages: torch wants memory that could be written.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes: torch.Tensor | None = None

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bytes is None:
            self._map.close()
        self._bytes = None  # unmapped with the last tensor on it

    def checksum(self, begin: int, end: int) -> int:
        with memoryview(self._map) as view, view[begin:end] as part:
            return seal.checksum(part)

    def tensor(self, piece: Piece) -> torch.Tensor:
        if self._bytes is None:
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        raw = self._bytes[piece.begin : piece.end]
        return raw.view(_dtype(piece, self._table)).view(piece.sizes)
