"""Which part of the state does this rank write? No word is exchanged: every rank comes to the same answer by itself."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
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
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    own: frozenset[str],
    *,
    shards: bool | None = None,
    known: dict[str, Chunk] | None = None,
) -> list[Chunk]:
    """What is sharded is written by whoever has it; what all have is dealt out by size; `own` are rank 0's to write.

    `shards`: whether this rank writes its shards; None: if it is in the first of the replicas. `known`: chunks of an
    earlier call, which are used again for shards in the same memory; those of this one are added.
    """
    known = {} if known is None else known
    loads = [(0, index) for index in range(world_size)]
    chunks = []
    layouts: dict[object, _Layout] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            key = (id(tensor.device_mesh), tensor.placements)
            if key not in layouts:
                layouts[key] = _Layout.of(tensor, shards)
            if layouts[key].writes:
                chunks += _sharded(name, tensor, layouts[key], known)
            continue
        writer = 0
        if name not in own and world_size > 1:
            load, writer = loads[0]
            heapq.heapreplace(loads, (load + tensor.numel() * tensor.element_size(), writer))
        if writer == rank:
            chunks.append(Chunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
    return chunks


@dataclass(frozen=True)
class _Layout:
    """Of tensors with the same mesh and placements, as this rank sees it."""

    writes: bool
    split: (
        tuple[int, int, int] | None
    )  # dimension, this rank's place along it, places; None: torch's planner has to say

    @classmethod
    def of(cls, tensor: DTensor, writes: bool | None) -> _Layout:
        place = tensor.device_mesh.get_coordinate()
        if place is None:
            return cls(False, None)
        kinds = list(zip(tensor.placements, place, tensor.device_mesh.shape, strict=True))
        if writes is None:  # of replicas the first writes
            writes = not any(kind.is_replicate() and at for kind, at, _ in kinds)
        splits = [(kind, at, count) for kind, at, count in kinds if not kind.is_replicate()]
        if len(splits) == 1 and type(splits[0][0]) is Shard:
            ((kind, at, count),) = splits
            return cls(writes, (kind.dim, at, count))
        return cls(writes, None)


def _sharded(name: str, tensor: DTensor, layout: _Layout, known: dict[str, Chunk]) -> list[Chunk]:
    part = tensor._local_tensor  # what `to_local` returns where no gradient is recorded
    before = known.get(name)
    if before is not None and before.part is part:
        return [before]
    if tensor.numel() and not part.numel():
        return []
    shape = tuple(tensor.shape)
    found = [Chunk(name, shape, offsets, part, sharded=True) for offsets in _offsets(name, tensor, layout)]
    if len(found) == 1:
        known[name] = found[0]
    return found


def _offsets(name: str, tensor: DTensor, layout: _Layout) -> list[tuple[int, ...]]:
    """Where this rank's part begins. torch's planner takes a fifth of a millisecond per tensor: too much for a snapshot
    at every step."""
    if layout.split is not None:
        dim, at, count = layout.split
        offsets = [0] * tensor.dim()
        offsets[dim] = min(at * -(-tensor.shape[dim] // count), tensor.shape[dim])
        return [tuple(offsets)]
    items = create_default_local_save_plan({name: tensor}, True).items
    return [tuple(item.tensor_data.chunk.offsets) for item in items if item.tensor_data is not None]
