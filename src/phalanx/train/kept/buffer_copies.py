"""Copies of the buffers of models, such as the running mean of a batch normalization, which a forward changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from phalanx.train.kept.kept_objects import KeptObjects

_SMALL = 1 << 16  # bytes: copying a buffer up to this size costs next to nothing


class BufferCopies:
    """Copies of the buffers of all models.

    copies.take()       before a forward
    copies.put_back()   undo what forwards have changed since then
    copies.settle()     before the second `take`: from then on, large buffers that do not change are not copied
    """

    def __init__(self, kept: KeptObjects) -> None:
        self._kept = kept
        self._places: list[_Place] = []
        self._buffers: list[torch.Tensor | None] = []  # there, when they were copied; a script may set others, or None
        self._often: dict[int, _Copy] = {}  # of a buffer, by its id
        self._rare: dict[int, _Copy] = {}  # of one that has not changed in the first step
        self._groups: list[_Group] = []  # those of `_often`, by type
        self._constant: set[tuple[int, str]] = set()  # module and name of those of `_rare`

    def take(self) -> None:
        """Copy the current buffers."""
        if not self._places:
            self._places = _places(self._kept.models)
        buffers = [buffers.get(name) for buffers, name, _ in self._places]
        same = len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers))
        if not same or any(one.is_resized for one in self._often.values()):
            self._enter(buffers)
        for group in self._groups:
            _copy(group.buffers, group.copies)
        for one in self._rare.values():
            one.renew()

    def put_back(self) -> None:
        """Restore the buffers from the copies."""
        for (buffers, name, _), buffer in zip(self._places, self._buffers, strict=True):
            if buffer is not None or name in buffers:
                buffers[name] = buffer
        for one in (*self._often.values(), *self._rare.values()):
            one.resize()
        for group in self._groups:
            _copy(group.copies, group.buffers)
        for one in self._rare.values():
            one.put_back()

    def settle(self) -> None:
        """Find the large buffers that have not changed since `take`, such as masks, and those that forwards have
        registered since then.
        """
        for place, buffer in zip(self._places, self._buffers, strict=True):
            one = self._often.get(id(buffer))
            if one is None or one.copy.nbytes <= _SMALL or place.buffers.get(place.name) is not buffer:
                continue
            if not one.is_resized and torch.equal(one.buffer, one.copy):
                self._constant.add((place.module, place.name))
        self._places, self._buffers = _places(self._kept.models), []

    def _enter(self, buffers: list[torch.Tensor | None]) -> None:
        """Make copies of other buffers than before, in the memory of those that stay: a forward may set a new one each
        time.
        """
        before = self._often | self._rare
        often: dict[int, _Copy] = {}
        rare: dict[int, _Copy] = {}
        for place, buffer in zip(self._places, buffers, strict=True):
            if buffer is None:
                continue
            one = before.get(id(buffer))
            if one is None or one.is_resized:
                if not _can_be_written(buffer):
                    continue
                one = _Copy(buffer, torch.empty_like(buffer))
            (rare if (place.module, place.name) in self._constant else often)[id(buffer)] = one
        self._buffers, self._often, self._rare, self._groups = buffers, often, rare, _grouped(often.values())


class _Place(NamedTuple):
    """Where a buffer is."""

    buffers: dict[str, torch.Tensor | None]  # of a module
    name: str
    module: int  # its id


class _Group(NamedTuple):
    """Buffers of one type, which one kernel copies."""

    buffers: list[torch.Tensor]
    copies: list[torch.Tensor]


@dataclass(slots=True)
class _Copy:
    """The copy of a buffer. torch counts the changes of a tensor, except those of `tensor.data`."""

    buffer: torch.Tensor
    copy: torch.Tensor
    version: int = -1  # of the buffer when it was copied as one that changes rarely

    def renew(self) -> None:
        if self.buffer._version != self.version:
            _copy([self.buffer], [self.copy])
            self.version = self.buffer._version

    def put_back(self) -> None:
        if self.buffer._version != self.version:
            _copy([self.copy], [self.buffer])
            self.version = self.buffer._version

    @property
    def is_resized(self) -> bool:
        return bool(self.buffer.shape != self.copy.shape)

    def resize(self) -> None:
        if self.is_resized:
            self.buffer.data = torch.empty_like(self.copy)


def _places(models: Iterable[Any]) -> list[_Place]:
    modules = {id(part): part for model in models for part in model.modules()}
    return [_Place(part._buffers, name, place) for place, part in modules.items() for name in part._buffers]


def _can_be_written(buffer: torch.Tensor) -> bool:
    """Return whether a forward can change the buffer in place, and so can we: its elements do not share memory."""
    if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_nested or buffer.is_inference():
        return False
    return all(size <= 1 or step for size, step in zip(buffer.shape, buffer.stride(), strict=True))


def _grouped(copies: Iterable[_Copy]) -> list[_Group]:
    groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
    for one in copies:
        group = groups.setdefault((one.buffer.dtype, one.buffer.device), _Group([], []))
        group.buffers.append(one.buffer)
        group.copies.append(one.copy)
    return list(groups.values())


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
