"""Checks the sizes, names and offsets of a checkpoint before anything is allocated or opened. Pure functions.

A checkpoint may come from anywhere. Its checksums detect errors, not manipulation: an attacker who changes a table can
change its checksum too. A checkpoint that passes these checks needs no more memory than its files have bytes, reads
nothing outside its folder, and fills every element of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.format import tensorfile
from phalanx.train.checkpoint.format.manifest import STATE, Manifest, Piece, Table, table_file, tensor_file
from phalanx.train.checkpoint.format.plain import tensor_names, unpacked

_MOST_RANKS = 1 << 20
_MOST_DIMENSIONS = 64


def check_manifest(manifest: Manifest) -> None:
    """Raise CheckpointError if the manifest does not name exactly the files of its ranks."""
    if not 1 <= manifest.world_size <= min(_MOST_RANKS, len(manifest.files)):
        raise CheckpointError(f"has files of {len(manifest.files)}, not of {manifest.world_size} ranks")
    ranks = range(manifest.world_size)
    texts = {STATE, *(table_file(rank) for rank in ranks)}
    wanted = texts | {tensor_file(rank) for rank in ranks}
    names = [entry.name for entry in manifest.files]
    missing, others = sorted(wanted - {*names}), sorted({*names} - wanted)
    if missing:
        raise CheckpointError(f"does not name {missing[0]}")
    if others:
        raise CheckpointError(f"names {others[0]!r}, which is not a file of a checkpoint")
    if len(names) != len(wanted):
        raise CheckpointError("names a file twice")
    for entry in manifest.files:
        if entry.size < 0:
            raise CheckpointError(f"{entry.name} has {entry.size} bytes")
        if entry.name in texts and entry.checksum is None:
            raise CheckpointError(f"{entry.name} has no checksum")


def check_tables(manifest: Manifest, tables: Sequence[Table]) -> None:
    """Raise CheckpointError if the tables do not describe whole tensors in the files of their ranks."""
    sizes = {entry.name: entry.size for entry in manifest.files}
    for rank, table in enumerate(tables):
        if (table.rank, table.file) != (rank, tensor_file(rank)):
            raise CheckpointError(f"{table_file(rank)}: is about rank {table.rank} and {table.file!r}")
        if table.size != sizes[table.file] or not 0 <= table.header <= table.size:
            raise CheckpointError(f"{table_file(rank)}: {table.file} has {sizes[table.file]:,} bytes")
        _check_pieces(table)
    tensors: dict[str, list[Piece]] = {}
    for table in tables:
        for piece in table.pieces:
            tensors.setdefault(piece.name, []).append(piece)
    for name, pieces in tensors.items():
        if not _is_whole(pieces):
            raise CheckpointError(f"{name}: its pieces do not make a tensor of shape {pieces[0].shape}")


def check_values(plain: Mapping[str, Any], extra: Mapping[str, Any], tables: Sequence[Table]) -> None:
    """Raise CheckpointError if the values cannot be decoded, or name a tensor that does not exist."""
    there = {piece.name for table in tables for piece in table.pieces}
    try:
        missing = sorted(map(str, tensor_names([plain, extra]) - there))
        if not missing:
            unpacked(plain, dict.fromkeys(there, torch.empty(0)))
            unpacked(extra, {})
    except CheckpointError:
        raise
    except Exception as error:  # raised by a tag's function, for anything in the file
        raise CheckpointError(f"{STATE}: cannot be decoded: {type(error).__name__}: {error}") from None
    if missing:
        raise CheckpointError(f"{STATE}: {missing[0]} is in no file")


def _check_pieces(table: Table) -> None:
    for piece in table.pieces:
        where = f"{table.file}: {piece.name}"
        dimensions = len(piece.shape)
        if dimensions > _MOST_DIMENSIONS or not dimensions == len(piece.offsets) == len(piece.sizes):
            raise CheckpointError(f"{where}: {dimensions} dimensions, {piece.offsets} and {piece.sizes}")
        boxes = zip(piece.shape, piece.offsets, piece.sizes, strict=True)
        if any(begin < 0 or size < 0 or begin + size > whole for whole, begin, size in boxes):
            raise CheckpointError(f"{where}: {piece.sizes} at {piece.offsets} is outside of {piece.shape}")
        nbytes = math.prod(piece.sizes) * tensorfile.dtype_of(piece.dtype).itemsize
        if not table.header <= piece.begin <= piece.end <= table.size or piece.end - piece.begin != nbytes:
            raise CheckpointError(
                f"{where}: {nbytes:,} bytes, from {piece.begin:,} to {piece.end:,} in a file of {table.size:,}"
            )
    places = sorted((piece.begin, piece.end, piece.name) for piece in table.pieces if piece.end > piece.begin)
    for (_, end, one), (begin, _, other) in pairwise(places):
        if begin < end:
            raise CheckpointError(f"{table.file}: {one} and {other} are in the same place")


def _is_whole(pieces: Sequence[Piece]) -> bool:
    """Return whether the pieces of a tensor fill it, each element once."""
    first = pieces[0]
    if any((piece.dtype, piece.shape) != (first.dtype, first.shape) for piece in pieces):
        return False
    filled = [piece for piece in pieces if math.prod(piece.sizes)]
    if sum(math.prod(piece.sizes) for piece in filled) != math.prod(first.shape):
        return False
    # There are as many elements as in the tensor: they fill it unless two pieces overlap.
    return len(filled) < 2 or not _overlap(filled)


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Return whether two boxes share an element. Boxes that share one overlap in every dimension."""
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    begins = torch.tensor([piece.offsets for piece in ordered], dtype=torch.int64)
    ends = begins + torch.tensor([piece.sizes for piece in ordered], dtype=torch.int64)
    for place in range(1, len(ordered)):
        before = (begins[:place] < ends[place]) & (begins[place] < ends[:place])
        if bool(before.all(dim=1).any()):
            return True
    return False
