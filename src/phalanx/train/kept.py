"""The state of a training: the objects that `run.keep` was given, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.train.data.loader import Loader
from phalanx.train.stepping import Stepper


@dataclass(slots=True, eq=False)
class TrainingProgress:
    """How far a training is."""

    steps: int = 0  # committed, since the very first start of the training
    epoch: int = 0
    epochs: int | None = None  # how many `run.epochs` was asked for
    start: int = 0  # the committed step from which this generation started
    samples: int = -1  # committed by this rank in this generation; -1: not counted


class KeptObjects:
    """The objects that `run.keep` was given, by name. The state of the stepper is kept with them."""

    def __init__(self, stepper: Stepper) -> None:
        self.objects: dict[str, Any] = {}
        self.ready = False  # restored: the objects hold the state of a committed step
        self._stepper = stepper

    def add(self, objects: Mapping[str, object]) -> None:
        """Keep these objects."""
        self.objects = dict(objects)
        self.adopt()

    def adopt(self) -> None:
        """Give optimizers that were made before FSDP sharded the model the parameters that there are now."""
        for kept in self.objects.values():
            if hasattr(kept, "param_groups"):
                self._stepper.adopt(kept)

    def everything(self) -> Mapping[str, object]:
        """Return all that a checkpoint contains, by name."""
        return {**self.objects, "phalanx.stepper": self._stepper}

    def has(self, thing: object) -> bool:
        """Return whether this very object is kept."""
        return any(thing is kept for kept in self.objects.values())

    def has_model(self, model: object) -> bool:
        """Return whether this model is kept, itself or wrapped."""
        from phalanx.train.checkpoint.state import unwrapped

        models = [unwrapped(kept) for kept in self.objects.values() if isinstance(kept, torch.nn.Module)]
        return any(kept is model for kept in models)

    @property
    def loaders(self) -> list[Loader]:
        """The loaders among the kept objects."""
        return [kept for kept in self.objects.values() if isinstance(kept, Loader)]

    def drop_unfinished_step(self, *, gradients: bool = True) -> None:
        """Leave nothing behind of a step that was not committed: whole FSDP parameters, gradients."""
        for kept in self.objects.values():
            for part in kept.modules() if isinstance(kept, torch.nn.Module) else ():
                if hasattr(part, "reshard"):
                    part.reshard()
            if gradients and hasattr(kept, "zero_grad"):
                kept.zero_grad(set_to_none=True)
