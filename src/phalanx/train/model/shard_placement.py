"""Which shard of a model this rank has, and how many ranks have the same one."""

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
    replicas: int  # number of ranks that have it


def held(kept: Mapping[str, object]) -> HeldShard | None:
    """Return the shard of the kept models. None: not sharded, in different ways, or along two dimensions."""
    tensors = [tensor for tensor in parameters(kept) if isinstance(tensor, DTensor)]
    found = {_held(tensor) for tensor in tensors}
    return found.pop() if len(found) == 1 and all(dimension(tensor) is not None for tensor in tensors) else None


def indices(kept: Mapping[str, object]) -> tuple[int, ...] | None:
    """Return the shard index of every rank for the kept models. None: not sharded (yet), or `held` returns None."""
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
    """Return the ranks of each replica of the kept models. Empty: not sharded, or in different ways."""
    tensor = next((tensor for tensor in parameters(kept) if isinstance(tensor, DTensor)), None)
    if tensor is None or held(kept) is None:
        return ()
    mesh = tensor.device_mesh.mesh.movedim(_along(tensor)[0], -1)
    return tuple(tuple(row) for row in mesh.reshape(-1, mesh.shape[-1]).tolist())


def dimension(tensor: torch.Tensor) -> int | None:
    """Return the dimension along which a tensor is sharded. None: it is not, or in another way."""
    along = _along(tensor) if isinstance(tensor, DTensor) else []
    if len(along) != 1 or type(tensor.placements[along[0]]) is not Shard:
        return None
    return int(tensor.placements[along[0]].dim)


def _along(tensor: DTensor) -> list[int]:
    """Return the dimensions of the mesh along which a tensor is sharded."""
    return [place for place, kind in enumerate(tensor.placements) if not kind.is_replicate()]


def is_sharded(kept: Mapping[str, object]) -> bool:
    """Return whether a kept model is sharded."""
    return any(isinstance(tensor, DTensor) for tensor in parameters(kept))


def is_replicated(kept: Mapping[str, object]) -> bool:
    """Return whether every shard exists on more than one rank."""
    return all(_held(tensor).replicas > 1 for tensor in parameters(kept) if isinstance(tensor, DTensor))


def parameters(kept: Mapping[str, object]) -> Iterable[torch.Tensor]:
    """Yield the parameters of the kept models."""
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
