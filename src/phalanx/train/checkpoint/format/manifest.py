"""The contents of a checkpoint besides tensors: a table per rank, and the manifest."""

from __future__ import annotations

from typing import Any

import msgspec

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"


class Piece(msgspec.Struct, frozen=True):
    """A box of a tensor in a file."""

    name: str
    dtype: str  # name in safetensors
    shape: list[int]  # of the whole tensor
    offsets: list[int]  # of the box in it
    sizes: list[int]
    begin: int  # in the file
    end: int
    checksum: int


class Table(msgspec.Struct, frozen=True):
    """What one rank has written: the contents of its file of tensors, and its random state."""

    rank: int
    file: str
    size: int
    header: int  # bytes before the data
    header_checksum: int
    pieces: list[Piece]
    random: dict[str, Any]
    digest: str = ""  # SHA-256 of the file, if the checkpoint is signed


class Entry(msgspec.Struct, frozen=True):
    """A file of a checkpoint. The checksums of tensors are in the table of the rank that wrote them."""

    name: str
    size: int
    checksum: int | None = None
    digest: str = ""  # SHA-256, if the checkpoint is signed


class Manifest(msgspec.Struct, frozen=True):
    """The list of files. It is written last: a folder without it is not a checkpoint."""

    format: int
    step: int
    world_size: int
    time: float
    phalanx: str
    torch: str
    metrics: dict[str, float | None]
    files: list[Entry]


class Values(msgspec.Struct, frozen=True):
    """All values that are not tensors, and are the same on all ranks."""

    step: int
    plain: dict[str, Any]
    extra: dict[str, Any]


def tensor_file(rank: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def table_file(rank: int) -> str:
    """Return the name of a rank's table."""
    return f"rank-{rank:05d}.json"


def failure_file(rank: int) -> str:
    """Return the name of the file that contains the error of a rank that could not write."""
    return f"rank-{rank:05d}.failed"
