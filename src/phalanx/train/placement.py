"""Which shard of a model this rank holds, and how many ranks hold the same one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Held:
    """The shard of one rank."""

    index: int
    count: int  # shards of the whole
    replicas: int  # ranks that hold this one


def held(kept: Mapping[str, object]) -> Held | None:
    """What the models among them have in common. None: they are not sharded, or not alike."""
    found = {_held(tensor) for tensor in parameters(kept) if isinstance(tensor, DTensor)}
    return found.pop() if len(found) == 1 else None


def is_sharded(kept: Mapping[str, object]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in parameters(kept))


def is_replicated(kept: Mapping[str, object]) -> bool:
    """Every shard is held by more than one rank."""
    return all(_held(tensor).replicas > 1 for tensor in parameters(kept) if isinstance(tensor, DTensor))


def parameters(kept: Mapping[str, object]) -> Iterable[torch.Tensor]:
    for thing in kept.values():
        if isinstance(thing, torch.nn.Module):
            yield from thing.parameters()


def _held(tensor: DTensor) -> Held:
    mesh = tensor.device_mesh
    place = mesh.get_coordinate() or [0] * mesh.ndim
    index, count = 0, 1
    for kind, at, size in zip(tensor.placements, place, mesh.shape, strict=True):
        if isinstance(kind, Shard):
            index, count = index * size + at, count * size
    return Held(index, count, math.prod(mesh.shape) // count)
