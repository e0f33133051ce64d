"""Copies of the buffers of models, such as the running mean of a batch normalization, which a forward changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.train.kept.kept_objects import KeptObjects


class BufferCopies:
    """Copies of the buffers of all models.

    copies.take()       before a forward
    copies.put_back()   undo what forwards have changed since then
    """

    def __init__(self, kept: KeptObjects) -> None:
        self._kept = kept
        self._places: list[tuple[Any, str]] | None = None  # modules, and the names of their buffers
        self._copies: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []  # the buffers that were copied last; a script may set others, or None
        self._owners: list[tuple[Any, str]] = []  # where they were
        self._groups: list[_Group] = []  # the same, with their copies

    def take(self) -> None:
        """Copy the current buffers."""
        if self._places is None:
            modules = {id(part): part for model in self._kept.models for part in model.modules()}
            places = [(part, name) for part in modules.values() for name in part._buffers]
            self._places = [(part, name) for part, name in places if not _is_expanded(part._buffers[name])]
        buffers = [buffer for part, name in self._places if (buffer := part._buffers.get(name)) is not None]
        if len(buffers) != len(self._taken) or not all(map(_unchanged, buffers, self._taken, self._copies)):
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
            self._groups = _grouped(buffers, self._copies)
            self._taken = buffers
            self._owners = [(part, name) for part, name in self._places if part._buffers.get(name) is not None]
        for group in self._groups:
            _copy(group.buffers, group.copies)

    def put_back(self) -> None:
        """Restore the buffers from the copies."""
        for (part, name), buffer in zip(self._owners, self._taken, strict=True):
            part._buffers[name] = buffer
        for buffer, copy in zip(self._taken, self._copies, strict=True):
            if buffer.shape != copy.shape:
                buffer.data = torch.empty_like(copy)
        for group in self._groups:
            _copy(group.copies, group.buffers)

    def drop_constants(self) -> None:
        """Make no more copies of buffers that have not changed since `take`, except statistics of normalizations."""
        self._places = [
            (part, name)
            for (part, name), buffer, copy in zip(self._owners, self._taken, self._copies, strict=True)
            if getattr(part, "track_running_stats", False)
            or part._buffers.get(name) is not buffer
            or not torch.equal(buffer, copy)
        ]
        self._taken, self._owners, self._copies, self._groups = [], [], [], []


class _Group(NamedTuple):
    """Buffers of one type, which one kernel copies."""

    buffers: list[torch.Tensor]
    copies: list[torch.Tensor]


def _is_expanded(buffer: torch.Tensor | None) -> bool:
    """Return whether elements share memory: nothing can write to such a buffer."""
    return buffer is not None and any(
        size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _unchanged(buffer: torch.Tensor, taken: torch.Tensor, copy: torch.Tensor) -> bool:
    return buffer is taken and buffer.shape == copy.shape


def _grouped(buffers: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> list[_Group]:
    groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
    for buffer, copy in zip(buffers, copies, strict=True):
        group = groups.setdefault((buffer.dtype, buffer.device), _Group([], []))
        group.buffers.append(buffer)
        group.copies.append(copy)
    return list(groups.values())


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
