"""Which part of the state does this rank write? No word is exchanged: every rank comes to the same answer by itself."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Chunk:
    """A box out of a tensor, and the memory in which it is."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box in it
    part: torch.Tensor
    sharded: bool = False  # a shard of FSDP's, which only an optimizer's update changes


def share(
    tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, own: frozenset[str], *, shards: bool | None = None
) -> list[Chunk]:
    """What is sharded is written by whoever has it; what all have is dealt out by size; `own` are rank 0's to write.

    `shards`: whether this rank writes its shards; None: if it is in the first of the replicas.
    """
    loads = [(0, index) for index in range(world_size)]
    chunks = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            chunks += _sharded(name, tensor, shards)
            continue
        writer = 0
        if name not in own and world_size > 1:
            load, writer = loads[0]
            heapq.heapreplace(loads, (load + tensor.numel() * tensor.element_size(), writer))
        if writer == rank:
            chunks.append(Chunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
    return chunks


def _sharded(name: str, tensor: DTensor, writes: bool | None) -> list[Chunk]:
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return []
    if writes is None:  # of replicas the first writes
        writes = not any(kind.is_replicate() and at for kind, at in zip(tensor.placements, place, strict=True))
    if not writes:
        return []
    with torch.no_grad():
        part = tensor.to_local()
    return [
        Chunk(name, tuple(tensor.shape), offsets, part, sharded=True)
        for offsets in _offsets(name, tensor, place)
        if part.numel() or not tensor.numel()
    ]


def _offsets(name: str, tensor: DTensor, place: Sequence[int]) -> list[tuple[int, ...]]:
    """Where this rank's part begins. torch's planner takes a fifth of a millisecond per tensor: too much for a snapshot
    at every step."""
    splits = _splits(tensor, place)
    if len(splits) == 1 and type(splits[0][0]) is Shard:
        ((kind, at, count),) = splits
        offsets = [0] * tensor.dim()
        size = tensor.shape[kind.dim]
        offsets[kind.dim] = min(at * -(-size // count), size)
        return [tuple(offsets)]
    items = create_default_local_save_plan({name: tensor}, True).items
    return [tuple(item.tensor_data.chunk.offsets) for item in items if item.tensor_data is not None]


def _splits(tensor: DTensor, place: Sequence[int]) -> list[tuple[Shard, int, int]]:
    """Each placement that divides the tensor, this rank's place along it, and how many places there are."""
    sizes = tensor.device_mesh.shape
    return [
        (kind, at, count)
        for kind, at, count in zip(tensor.placements, place, sizes, strict=True)
        if not kind.is_replicate()
    ]
