"""State from a living rank to one that has none: as raw tensors, from memory to memory.

Whoever is left after a death holds what it held after its last step; most often all of them the same. The newest of
these is what everybody goes on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.join.group import Group
from phalanx.train.checkpoint import state
from phalanx.train.checkpoint.state import Shape, State


@dataclass(frozen=True)
class Past:
    """What a rank held when its group was lost, as of its last committed step."""

    step: int
    epoch: int
    kept: Mapping[str, object] = field(repr=False)


@dataclass(frozen=True)
class Received:
    step: int
    epoch: int


def hand_over(group: Group, kept: Mapping[str, object], past: Past | None) -> Received | None:
    """Everybody has the newest state afterwards. None: nobody has any, or a part of it is lost for good."""
    offers = group.gather([-1 if past is None else past.step, 0 if past is None else _shards(past)], all=True) or []
    steps = [step for step, _ in offers]
    newest = max(steps)
    lacking = [rank for rank, step in enumerate(steps) if step != newest]
    shards = max(shards for _, shards in offers)
    if newest < 0 or (shards and (lacking or shards != group.world_size)):
        return None
    source = steps.index(newest)
    held = state.taken(past.kept) if past is not None and past.step == newest else None
    header: Any = None
    if lacking:
        header = group.broadcast(_header(held, past) if held is not None and past is not None else None, source)
    if held is None or past is None:
        _receive(group, kept, header, source)
        return Received(header["step"], header["epoch"])
    if group.rank == source:
        for rank in lacking:
            for tensor in held.tensors.values():
                dist.send(_on_the_wire(group, tensor.detach()).contiguous(), rank)
    _put(kept, held.plain, held.tensors)
    return Received(past.step, past.epoch)


def _shards(past: Past) -> int:
    """Over how many ranks a model is sharded; 0: none is."""
    return max(
        (
            parameter.device_mesh.size()
            for thing in past.kept.values()
            if isinstance(thing, torch.nn.Module)
            for parameter in thing.parameters()
            if isinstance(parameter, DTensor)
        ),
        default=0,
    )


def _put(kept: Mapping[str, object], plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Into the objects of this rank, unless they are the very ones that it comes from."""
    shapes = {name: Shape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    targets = state.targets(kept, plain, shapes)
    with torch.no_grad():
        for name, target in targets.items():
            if target.data_ptr() != tensors[name].data_ptr() or not target.numel():
                target.copy_(tensors[name])
    state.restore(kept, plain, targets)


def _header(held: State, past: Past) -> dict[str, Any]:
    shapes = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in held.tensors.items()}
    return {"step": past.step, "epoch": past.epoch, "plain": held.plain, "shapes": shapes}


def _receive(group: Group, kept: Mapping[str, object], header: Any, source: int) -> None:
    shapes = {name: Shape(getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in header["shapes"].items()}
    targets = state.targets(kept, header["plain"], shapes)
    with torch.no_grad():
        for name, shape in shapes.items():
            target = targets[name].detach()
            arriving = _on_the_wire(group, target)
            if arriving is not target or not target.is_contiguous():
                arriving = _on_the_wire(group, shape.empty())
            dist.recv(arriving, source)
            if arriving is not target:
                target.copy_(arriving)
    state.restore(kept, header["plain"], targets)


def _on_the_wire(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Where the backend can carry it: nccl alone carries nothing that is on the CPU."""
    return tensor if "gloo" in group.backend or tensor.is_cuda else tensor.to(group.device)
