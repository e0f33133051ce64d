"""Which shard of a model this rank holds, and how many ranks hold the same one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class HeldShard:
    """The shard of one rank."""

    index: int
    count: int  # shards of the whole
    replicas: int  # ranks that hold this one


def held(kept: Mapping[str, object]) -> HeldShard | None:
    """What the models among them have in common. None: they are not sharded, not alike, or along two dimensions."""
    tensors = [tensor for tensor in parameters(kept) if isinstance(tensor, DTensor)]
    found = {_held(tensor) for tensor in tensors}
    return found.pop() if len(found) == 1 and all(dimension(tensor) is not None for tensor in tensors) else None


def indices(kept: Mapping[str, object]) -> tuple[int, ...] | None:
    """The shard that each rank of the world holds of the models among them. None: they are not sharded (yet), or not as
    `held` wants it."""
    tensor = next((tensor for tensor in parameters(kept) if isinstance(tensor, DTensor)), None)
    if tensor is None or held(kept) is None:
        return None
    mesh, along = tensor.device_mesh.mesh, _along(tensor)
    found = {}
    for index in range(mesh.shape[along[0]]):
        for rank in mesh.select(along[0], index).flatten().tolist():
            found[rank] = index
    return tuple(found[rank] for rank in range(len(found))) if sorted(found) == list(range(len(found))) else None


def replicas(kept: Mapping[str, object]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each replica of the models among them. None at all: they are not sharded, or not alike."""
    tensor = next((tensor for tensor in parameters(kept) if isinstance(tensor, DTensor)), None)
    if tensor is None or held(kept) is None:
        return ()
    mesh = tensor.device_mesh.mesh.movedim(_along(tensor)[0], -1)
    return tuple(tuple(row) for row in mesh.reshape(-1, mesh.shape[-1]).tolist())


def dimension(tensor: torch.Tensor) -> int | None:
    """Along which it is sharded. None: it is not, or in a way of its own."""
    along = _along(tensor) if isinstance(tensor, DTensor) else []
    if len(along) != 1 or type(tensor.placements[along[0]]) is not Shard:
        return None
    return int(tensor.placements[along[0]].dim)


def _along(tensor: DTensor) -> list[int]:
    """The dimensions of the mesh by which it is divided."""
    return [place for place, kind in enumerate(tensor.placements) if not kind.is_replicate()]


def is_sharded(kept: Mapping[str, object]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in parameters(kept))


def is_replicated(kept: Mapping[str, object]) -> bool:
    """Every shard is held by more than one rank."""
    return all(_held(tensor).replicas > 1 for tensor in parameters(kept) if isinstance(tensor, DTensor))


def parameters(kept: Mapping[str, object]) -> Iterable[torch.Tensor]:
    for thing in kept.values():
        if isinstance(thing, torch.nn.Module):
            yield from thing.parameters()


def _held(tensor: DTensor) -> HeldShard:
    mesh = tensor.device_mesh
    place = mesh.get_coordinate() or [0] * mesh.ndim
    index, count = 0, 1
    for kind, at, size in zip(tensor.placements, place, mesh.shape, strict=True):
        if isinstance(kind, Shard):
            index, count = index * size + at, count * size
    return HeldShard(index, count, math.prod(mesh.shape) // count)
