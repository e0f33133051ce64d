"""The state of a training: the arguments of `run.keep`, and the progress."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import UsageError
from phalanx.train.data.loader import Loader
from phalanx.train.kept.kept_values import KeptValues, is_value, refusal
from phalanx.train.stepping.stepper import Stepper


@dataclass(slots=True, eq=False)
class TrainingProgress:
    """The progress of a training."""

    steps: int = 0  # committed, since the very first start of the training
    epoch: int = 0
    epochs: int | None = None  # argument of `run.epochs`
    start: int = 0  # the committed step from which this generation started
    samples: int = -1  # committed by this rank in this generation; -1: not counted


class KeptObjects:
    """The objects and values that were passed to `run.keep`, by name. The state of the stepper is kept with them."""

    def __init__(self, stepper: Stepper) -> None:
        self.objects: dict[str, Any] = {}
        self.values = KeptValues()
        self.ready = False  # restored: the objects have the state of a committed step
        self._stepper = stepper

    def add(self, unnamed: Sequence[object], named: Mapping[str, object]) -> bool:
        """Add the arguments of `run.keep`. Return whether there were objects, which can only be passed once."""
        objects, values = divided(unnamed, named)
        if objects and self.objects:
            both = ", ".join((*self.objects, *objects))
            raise UsageError(
                f"keep() was called before, with {', '.join(self.objects)}",
                fix=f"run.keep({both}), once; values can be set at any time: run.keep(best=0.93)",
            )
        if twice := (objects.keys() | self.objects.keys()) & values.keys():
            raise UsageError(f'"{min(twice)}" is the name of an object that is kept', fix="choose another name")
        self.values.give(values)
        self.objects = objects or self.objects
        self.adopt()
        return bool(objects)

    def adopt(self) -> None:
        """Give optimizers that were created before FSDP sharded the model the current parameters."""
        for kept in self.objects.values():
            if hasattr(kept, "param_groups"):
                self._stepper.adopt(kept)

    def everything(self) -> Mapping[str, object]:
        """Return everything that a checkpoint contains, by name."""
        return {**self.objects, "phalanx.values": self.values, "phalanx.stepper": self._stepper}

    def committed(self) -> Mapping[str, object]:
        """Return the same, with the values of the last committed step. Objects are already in that state."""
        return {**self.everything(), "phalanx.values": self.values.committed}

    def has(self, thing: object) -> bool:
        """Return whether this very object is kept."""
        return any(thing is kept for kept in self.objects.values())

    def contains(self, thing: object) -> bool:
        """Return whether this object is kept, itself or as a part of another one, such as an attribute of a trainer."""
        level: list[object] = list(self.objects.values())
        seen = set(map(id, level))
        for _ in range(_DEPTH):
            if any(one is thing for one in level):
                return True
            parts = {id(part): part for one in level for part in _parts(one)}
            level = [part for key, part in parts.items() if key not in seen]
            seen.update(parts)
        return False

    def has_model(self, model: object) -> bool:
        """Return whether this model is kept, itself or wrapped."""
        from phalanx.train.checkpoint.state import unwrapped

        models = [unwrapped(kept) for kept in self.objects.values() if isinstance(kept, torch.nn.Module)]
        return any(kept is model for kept in models)

    def are_wrapped(self, names: Iterable[str]) -> bool:
        """Return whether all models among the kept objects with these names are wrapped."""
        from phalanx.train.checkpoint.state import unwrapped

        wrapped = {id(part) for model in self._stepper.models for part in (model, getattr(model, "module", None))}
        models = [self.objects[name] for name in names if isinstance(self.objects.get(name), torch.nn.Module)]
        return all(id(unwrapped(model)) in wrapped for model in models)

    @property
    def models(self) -> list[Any]:
        """The models among the kept objects, and those that were wrapped."""
        return [*(kept for kept in self.objects.values() if isinstance(kept, torch.nn.Module)), *self._stepper.models]

    @property
    def loaders(self) -> list[Loader]:
        """The loaders among the kept objects."""
        return [kept for kept in self.objects.values() if isinstance(kept, Loader)]

    def drop_unfinished_step(self, *, gradients: bool = True) -> None:
        """Discard a step that was not committed: whole FSDP parameters, gradients."""
        for kept in self.objects.values():
            for part in kept.modules() if isinstance(kept, torch.nn.Module) else ():
                if hasattr(part, "reshard"):
                    part.reshard()
            if gradients and hasattr(kept, "zero_grad"):
                kept.zero_grad(set_to_none=True)


_DEPTH, _PARTS = 4, 100  # limits of the search for a part of a kept object


def _parts(owner: object) -> list[object]:
    """Return the attributes and elements of an object."""
    if isinstance(owner, torch.Tensor | type):
        return []
    elements = owner.values() if isinstance(owner, Mapping) else owner if isinstance(owner, list | tuple) else ()
    return [*getattr(owner, "__dict__", {}).values(), *itertools.islice(elements, _PARTS)]


def divided(unnamed: Sequence[object], named: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects and the values among the arguments of `run.keep`, by name."""
    for name in _OPTIONS & named.keys():
        raise UsageError(
            f"{name} is an option of checkpoints, and keep() takes only what is kept",
            fix=f"run.checkpoints({name}={named[name]!r}), before run.keep(…)",
        )
    objects: dict[str, Any] = {}
    for thing in unnamed:
        if not _has_state(thing):
            raise _unnamed(thing)
        name = _kind(thing)
        number = 2
        while name in objects or name in named:
            name, number = f"{_kind(thing)}{number}", number + 1
        objects[name] = thing
    values: dict[str, Any] = {}
    for name, thing in named.items():
        if not _has_state(thing) and not is_value(thing):
            raise refusal(thing, name)
        (objects if _has_state(thing) else values)[name] = thing
    return objects, values


def _unnamed(thing: object) -> UsageError:
    """Return the error for an argument without a name that is not an object with a state."""
    parts = list(thing.values()) if isinstance(thing, Mapping) else thing
    if isinstance(parts, list | tuple) and any(_has_state(part) for part in parts):
        fix = ", ".join(map(_kind, filter(_has_state, parts)))
        return UsageError(f"keep() was given a {type(thing).__name__} of objects", fix=f"run.keep({fix})")
    if isinstance(thing, type):
        name = thing.__name__
        return UsageError(
            f"keep() was given the class {name}, not an object", fix=f"model = {name}(…), run.keep(model)"
        )
    if not is_value(thing):
        return refusal(thing, _kind(thing))
    shown = repr(thing)
    return UsageError(f"a value needs a name: run.keep(name={shown if len(shown) < 60 else '…'})")


# Kept as values, they would leave a training without the checkpoints that it needs.
_OPTIONS = frozenset(("folder", "every", "keep_last", "keep_best"))


def _has_state(thing: object) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict") and not isinstance(thing, type)


def _kind(thing: object) -> str:
    """Return a name for an object without one. A checkpoint is found again by it."""
    if isinstance(thing, torch.nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau):
        return "scheduler"
    return "loader" if isinstance(thing, Loader) else type(thing).__name__.lower()
