"""Optimizers that were created before FSDP replaced the parameters of a model by sharded ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch


class ReplacedParameters:
    """The parameters of a model before and after it was wrapped: pairs of those that were replaced."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]] = ()) -> None:
        # Weak references: the parameters before sharding are whole, and holding them would undo what sharding saves.
        self._after = {id(before): (weakref.ref(before), after) for before, after in pairs}

    def adopt(self, opt: Any) -> None:
        """Give an optimizer the current parameters, and shard its state in the same way.

        Nothing is exchanged with other ranks, and the optimizer changes at the end, all at once: if the group is lost
        here, this optimizer may be all that is left of the training.
        """
        state = {}
        for parameter, values in opt.state.items():
            now = self._now(parameter)
            state[now] = {name: _alike(value, parameter, now) for name, value in values.items()}
        for group in opt.param_groups:
            group["params"] = [self._now(parameter) for parameter in group["params"]]
        opt.state.clear()
        opt.state.update(state)

    def _now(self, parameter: Any) -> Any:
        known, after = self._after.get(id(parameter), (None, None))
        # The id may now be that of another object.
        return after if known is not None and known() is parameter else parameter


def _alike(value: Any, before: Any, now: Any) -> Any:
    """Return the state of an optimizer, sharded like its parameter. A counter is unchanged."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    value = value.to(now.device)
    if now is before or value.shape != before.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # The state is that of a committed step, equal on all ranks. Otherwise torch would send that of rank 0.
    return distribute_tensor(value, now.device_mesh, now.placements, src_data_rank=None)
