"""Which part of the state does this rank write? No word is exchanged: every rank comes to the same answer by itself."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Chunk:
    """A box out of a tensor, and the memory in which it is."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box in it
    part: torch.Tensor


def share(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, own: frozenset[str]) -> list[Chunk]:
    """What is sharded is written by whoever has it; what all have is dealt out by size; `own` are rank 0's to write."""
    loads = [(0, index) for index in range(world_size)]
    chunks = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            chunks += _sharded(name, tensor)
            continue
        writer = 0
        if name not in own and world_size > 1:
            load, writer = loads[0]
            heapq.heapreplace(loads, (load + tensor.numel() * tensor.element_size(), writer))
        if writer == rank:
            chunks.append(Chunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
    return chunks


def _sharded(name: str, tensor: DTensor) -> list[Chunk]:
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return []
    # Of replicas the first writes.
    if any(kind.is_replicate() and at for kind, at in zip(tensor.placements, place, strict=True)):
        return []
    chunks = []
    for item in create_default_local_save_plan({name: tensor}, True).items:
        if item.tensor_data is None:
            continue
        box = item.tensor_data.chunk
        part = tensor.to_local()
        if part.numel() or not tensor.numel():
            chunks.append(Chunk(name, tuple(tensor.shape), tuple(box.offsets), part))
    return chunks
