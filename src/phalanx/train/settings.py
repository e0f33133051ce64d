"""Settings of optimizers and schedulers, such as learning rates, at one point in time.

A script changes them where it creates a scheduler, or at the end of an epoch. If it runs this code again after a
failure, the change must not count twice. Tensors are not included: only steps change them.
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
    """The settings of all kept optimizers and schedulers, to be restored later."""

    def __init__(self, kept: Mapping[str, object]) -> None:
        from phalanx.train.checkpoint.format.plain import packed

        self._groups: list[tuple[Any, list[dict[str, Any]]]] = []  # of optimizers
        self._others: list[tuple[Any, Any]] = []  # schedulers, and other objects whose state has no tensors
        for name, thing in kept.items():
            if isinstance(thing, torch.optim.Optimizer):
                plain = [{key: group[key] for key in group if key != "params"} for group in thing.param_groups]
                self._groups.append((thing, copy.deepcopy(plain)))
            elif not isinstance(thing, torch.nn.Module | Loader) and hasattr(thing, "state_dict"):
                tensors: dict[str, torch.Tensor] = {}
                with contextlib.suppress(CheckpointError):  # a save raises it
                    plain = packed(thing.state_dict(), name, tensors)
                    self._others += [] if tensors else [(thing, plain)]

    def put_back(self) -> None:
        """Restore the settings."""
        from phalanx.train.checkpoint.format.plain import unpacked

        for opt, plain in self._groups:
            for group, before in zip(opt.param_groups, plain, strict=False):
                group.update(copy.deepcopy(before))
        for thing, state in self._others:
            thing.load_state_dict(unpacked(state, {}))
