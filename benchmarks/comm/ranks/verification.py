"""Verification: fills tensors with patterns that identify their rank, and counts wrong elements afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.comm import traffic
from benchmarks.comm.ranks.operations import ROOT, Buffers, Task

Tile = tuple[int, ...]  # repeated over the whole tensor

_WIDTH = 2048  # tiles per row
_SLAB = 128  # rows that are compared at once


def period(ranks: int) -> int:
    """Return the length of a tile: the sum of all ranks must be exact in 16 bits, and in 8 bits for few ranks."""
    return 5 if ranks <= 25 else 2


def tile(rank: int, start: int, ranks: int) -> Tile:
    """Return the pattern of a rank's tensor from the element `start` on."""
    length = period(ranks)
    return tuple((start + index + rank) % length for index in range(length))


def total(start: int, ranks: int) -> Tile:
    """Return the sum of the patterns of all ranks."""
    return tuple(map(sum, zip(*(tile(rank, start, ranks) for rank in range(ranks)), strict=True)))


def fill_tensor(tensor: torch.Tensor, tile_: Sequence[int]) -> None:
    """Repeat a tile over a tensor."""
    row = _row(tensor, tile_)
    whole, rest = _split(tensor, len(row))
    whole.copy_(row)
    rest.copy_(row[: len(rest)])


def count_differences(tensor: torch.Tensor, tile_: Sequence[int]) -> int:
    """Return how many elements differ from a repeated tile."""
    row = _row(tensor, tile_)
    whole, rest = _split(tensor, len(row))
    found = sum(int((slab != row).sum()) for slab in whole.split(_SLAB)) if len(whole) else 0
    return found + int((rest != row[: len(rest)]).sum())


def fill(task: Task, b: Buffers) -> None:
    """Fill the inputs of a task, and the outputs with values that cannot be mistaken for a result."""
    if task.operation in ("barrier", traffic.COPY):
        return
    own = tile(b.rank, 0, b.ranks)
    blank = (-1,) if b.whole.dtype.is_signed else (99,)
    for tensor in (b.whole, b.other, b.part):
        fill_tensor(tensor, blank)
    match task.operation:
        case "all_gather" | "gather":
            fill_tensor(b.part, own)
        case "all_gather_into_tensor":
            fill_tensor(b.wholes[b.rank] if task.place == "in" else b.part, own)
        case "broadcast" | "scatter" if b.rank != ROOT:
            pass
        case _:
            fill_tensor(b.whole, own)


def count_wrong(task: Task, b: Buffers) -> int:
    """Return how many elements of this rank are wrong after a task."""
    return sum(count_differences(tensor, tile) for tensor, tile in _expected(task, b))


def _expected(task: Task, b: Buffers) -> list[tuple[torch.Tensor, Tile]]:
    each = len(b.part)
    root = b.rank == ROOT
    match task.operation:
        case "all_reduce":
            return [(b.whole, total(0, b.ranks))]
        case "reduce" if root:
            return [(b.whole, total(0, b.ranks))]
        case "broadcast":
            return [(b.whole, tile(ROOT, 0, b.ranks))]
        case "all_gather" | "all_gather_into_tensor":
            return [(part, tile(rank, 0, b.ranks)) for rank, part in enumerate(b.wholes)]
        case "gather" if root:
            return [(part, tile(rank, 0, b.ranks)) for rank, part in enumerate(b.wholes)]
        case "reduce_scatter" | "reduce_scatter_tensor":
            where = b.wholes[b.rank] if task.place == "in" else b.part
            return [(where, total(b.rank * each, b.ranks))]
        case "all_to_all" | "all_to_all_single":
            return [(part, tile(rank, b.rank * each, b.ranks)) for rank, part in enumerate(b.others)]
        case "scatter":
            return [(b.part, tile(ROOT, b.rank * each, b.ranks))]
        case "sendrecv":
            return [(b.other, tile((b.rank - 1) % b.ranks, 0, b.ranks))]
        case "pingpong" if b.rank in (0, b.ranks - 1):
            return [(b.other, tile(b.ranks - 1 - b.rank, 0, b.ranks))]
    return []


def _row(tensor: torch.Tensor, tile_: Sequence[int]) -> Any:
    return torch.tensor(tile_).to(tensor.dtype).repeat(_WIDTH).to(tensor.device)


def _split(tensor: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = tensor.view(-1)
    rows = len(flat) // width
    return flat[: rows * width].view(rows, width), flat[rows * width :]
