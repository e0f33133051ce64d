"""Objects that a process creates once, however often its group forms: models, optimizers, compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from phalanx.errors import UsageError
from phalanx.train.data import rng
from phalanx.train.data.loader import Loader
from phalanx.train.model.wrapped import Wrapped

T = TypeVar("T")


@dataclass(frozen=True)
class _Made:
    name: str
    thing: Any
    rng: Any  # the random state after it was created


class MadeOnce:
    """The objects of `run.once`, found by the order of the calls: the n-th call returns the n-th object."""

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._asked = 0

    def enter(self) -> None:
        """Start again with the first object, when `train` is called.

        If one of them was sharded by FSDP, all are created again: it is tied to a group that no longer exists.
        """
        self._asked = 0
        if any(_is_sharded(part) for made in self._made for part in _parts(made.thing)):
            self._made.clear()

    def forget(self) -> None:
        """Drop all objects: they belong to no committed step."""
        self._made.clear()

    def get(self, make: Callable[[], T], device: Any) -> T:
        """Return the next object; call `make` to create it if it does not exist yet."""
        name, place = _name(make), self._asked
        if place < len(self._made):
            made = self._made[place]
            if made.name != name:
                raise UsageError(
                    f"call {place + 1} of once() is once({name}), but was once({made.name}) in the last call of train",
                    details=["objects are found again by the order of the calls"],
                    fix="call run.once for the same things in the same order each time, outside of any condition",
                )
            rng.set_state(made.rng, device)
        else:
            thing = make()
            for part in _parts(thing):
                if isinstance(part, Loader | Wrapped):
                    raise UsageError(
                        f"once({name}) made a {type(part).__name__}, which belongs to one process group",
                        fix="make models and optimizers in it; call run.loader and run.wrap each time train is called",
                    )
            made = _Made(name, thing, rng.state(device))
            self._made.append(made)
        self._asked += 1
        return made.thing  # type: ignore[no-any-return]


def _name(make: Any) -> str:
    return str(getattr(make, "__qualname__", None) or type(make).__qualname__)


def _parts(thing: Any) -> list[Any]:
    """Return the object, or those in a tuple, list or dict."""
    if isinstance(thing, dict):
        return [*thing.values()]
    return [*thing] if isinstance(thing, (tuple, list)) else [thing]


def _is_sharded(thing: Any) -> bool:
    return isinstance(thing, torch.nn.Module) and any(isinstance(one, DTensor) for one in thing.parameters())
