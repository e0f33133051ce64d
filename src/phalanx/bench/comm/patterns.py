"""Numbers that tell where they come from, and stay exact when added up: what goes in, and whether it came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tile = tuple[int, ...]  # repeated from the first element to the last

_WIDTH = 2048  # tiles that are compared at once
_SLAB = 128  # times so many


def period(ranks: int) -> int:
    """Small enough for the sum of all ranks to be exact in 16 bits, and in 8 for few."""
    return 5 if ranks <= 25 else 2


def tile(rank: int, start: int, ranks: int) -> Tile:
    """What a rank's tensor holds from the element `start` on."""
    length = period(ranks)
    return tuple((start + index + rank) % length for index in range(length))


def total(start: int, ranks: int) -> Tile:
    """All ranks' together."""
    return tuple(map(sum, zip(*(tile(rank, start, ranks) for rank in range(ranks)), strict=True)))


def fill(tensor: torch.Tensor, tile_: Sequence[int]) -> None:
    row = _row(tensor, tile_)
    whole, rest = _split(tensor, len(row))
    whole.copy_(row)
    rest.copy_(row[: len(rest)])


def wrong(tensor: torch.Tensor, tile_: Sequence[int]) -> int:
    """How many elements are not what they should be."""
    row = _row(tensor, tile_)
    whole, rest = _split(tensor, len(row))
    found = sum(int((slab != row).sum()) for slab in whole.split(_SLAB)) if len(whole) else 0
    return found + int((rest != row[: len(rest)]).sum())


def _row(tensor: torch.Tensor, tile_: Sequence[int]) -> Any:
    return torch.tensor(tile_).to(tensor.dtype).repeat(_WIDTH).to(tensor.device)


def _split(tensor: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = tensor.view(-1)
    rows = len(flat) // width
    return flat[: rows * width].view(rows, width), flat[rows * width :]
