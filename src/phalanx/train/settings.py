"""Learning rates and whatever else optimizers and schedulers were told, as it was at some point, to be put back there.

A script sets it in places of its own: where a scheduler is made, or at the end of an epoch. Where it goes through such
a place a second time, it must not count twice. Not tensors: only steps change those, and they are many.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.errors import CheckpointError
from phalanx.train.data.loader import Loader


class OptimizerSettings:
    def __init__(self, kept: Mapping[str, object]) -> None:
        from phalanx.train.checkpoint.plain import packed

        self._groups: list[tuple[Any, list[dict[str, Any]]]] = []  # of optimizers
        self._others: list[tuple[Any, Any]] = []  # schedulers, and what else has a state without tensors
        for name, thing in kept.items():
            if isinstance(thing, torch.optim.Optimizer):
                plain = [{key: group[key] for key in group if key != "params"} for group in thing.param_groups]
                self._groups.append((thing, copy.deepcopy(plain)))
            elif not isinstance(thing, torch.nn.Module | Loader) and hasattr(thing, "state_dict"):
                tensors: dict[str, torch.Tensor] = {}
                with contextlib.suppress(CheckpointError):  # it is told where it is to be kept
                    plain = packed(thing.state_dict(), name, tensors)
                    self._others += [] if tensors else [(thing, plain)]

    def put_back(self) -> None:
        from phalanx.train.checkpoint.plain import unpacked

        for opt, plain in self._groups:
            for group, before in zip(opt.param_groups, plain, strict=False):
                group.update(copy.deepcopy(before))
        for thing, state in self._others:
            thing.load_state_dict(unpacked(state, {}))
