"""Decides which part of the state this rank writes. Every rank computes the same answer without communication."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and its memory."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box in it
    part: torch.Tensor
    sharded: bool = False  # a shard of FSDP, which only an optimizer changes


def share(
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    own: frozenset[str],
    *,
    shards: bool | None = None,
    known: dict[str, Chunk] | None = None,
) -> list[Chunk]:
    """Return the chunks that this rank writes: its shards, and a share of the data that all ranks have, divided by
    size.

    own     names of tensors that rank 0 writes
    shards  whether this rank writes its shards; None: if it is in the first replica
    known   chunks of an earlier call, reused for shards in the same memory; new ones are added
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
    """How tensors of the same mesh and placements are sharded, for this rank."""

    writes: bool
    split: tuple[int, int, int] | None  # dimension, index of this rank, count; None: use torch's planner

    @classmethod
    def of(cls, tensor: DTensor, writes: bool | None) -> _Layout:
        place = tensor.device_mesh.get_coordinate()
        if place is None:
            return cls(False, None)
        kinds = list(zip(tensor.placements, place, tensor.device_mesh.shape, strict=True))
        if writes is None:  # the first replica writes
            writes = not any(kind.is_replicate() and at for kind, at, _ in kinds)
        splits = [(kind, at, count) for kind, at, count in kinds if not kind.is_replicate()]
        if len(splits) == 1 and type(splits[0][0]) is Shard:
            ((kind, at, count),) = splits
            return cls(writes, (kind.dim, at, count))
        return cls(writes, None)


def _sharded(name: str, tensor: DTensor, layout: _Layout, known: dict[str, Chunk]) -> list[Chunk]:
    part = tensor._local_tensor  # the result of `to_local` without autograd
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
    """Return where this rank's part begins. torch's planner takes 0.2 ms per tensor: too long for a snapshot per
    step.
    """
    if layout.split is not None:
        dim, at, count = layout.split
        offsets = [0] * tensor.dim()
        offsets[dim] = min(at * -(-tensor.shape[dim] // count), tensor.shape[dim])
        return [tuple(offsets)]
    items = create_default_local_save_plan({name: tensor}, True).items
    return [tuple(item.tensor_data.chunk.offsets) for item in items if item.tensor_data is not None]
