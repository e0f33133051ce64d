"""Optimizers that were created before FSDP replaced the parameters of a model by sharded ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch


class ReplacedParameters:
    """The parameters of a model before and after it was wrapped: pairs of those that were replaced.

    `equal`: the state of their optimizers is the same on all ranks. Otherwise that of rank 0 is used.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]] = (), *, equal: bool = False) -> None:
        self._source = None if equal else 0
        # Weak references: the parameters before sharding are whole, and holding them would undo what sharding saves.
        self._after = {id(before): (weakref.ref(before), after) for before, after in pairs}

    def adopt(self, opt: Any) -> None:
        """Give an optimizer the current parameters, and shard its state in the same way."""
        for group in opt.param_groups:
            group["params"] = [self._now(parameter) for parameter in group["params"]]
        for parameter in list(opt.state):
            now = self._now(parameter)
            state = opt.state.pop(parameter).items()
            opt.state[now] = {name: _alike(value, parameter, now, self._source) for name, value in state}

    def _now(self, parameter: Any) -> Any:
        known, after = self._after.get(id(parameter), (None, None))
        # The id may now be that of another object.
        return after if known is not None and known() is parameter else parameter


def _alike(value: Any, before: Any, now: Any, source: int | None) -> Any:
    """Return the state of an optimizer, sharded like its parameter. A counter is unchanged.

    `source`: the rank whose state is used; None: each rank shards its own, and sends nothing.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    value = value.to(now.device)
    if now is before or value.shape != before.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, now.device_mesh, now.placements, src_data_rank=source)
