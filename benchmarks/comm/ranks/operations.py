"""Operations and their tensors, for all backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.comm import traffic

Call = Callable[[], object]  # one operation on existing tensors, called many times
ROOT = 0

_BOTH = [name for name, operation in traffic.OPERATIONS.items() if operation.place == "both"]


@dataclass(frozen=True)
class Task:
    """One operation of one size, for any backend."""

    operation: str
    dtype: str
    place: str
    size: int

    @property
    def name(self) -> str:
        """The name that tables show."""
        return f"{self.operation} in place" if self.place == "in" and self.operation in _BOTH else self.operation


@dataclass(frozen=True)
class Buffers:
    """The tensors of an operation. `whole` is the input, or is changed in place; `other` and `part` are outputs."""

    whole: torch.Tensor
    other: torch.Tensor
    part: torch.Tensor
    rank: int
    ranks: int

    @classmethod
    def allocate(cls, size: int, dtype: str, device: torch.device, rank: int, ranks: int) -> Buffers:
        """Allocate tensors of `size` bytes, which all backends of a device share."""
        count = max(1, size // traffic.DTYPES[dtype])
        count = -(-count // ranks) * ranks  # so that every rank has a part, however small
        kind = getattr(torch, dtype)
        whole, other = (torch.ones(count, dtype=kind, device=device) for _ in range(2))
        return cls(whole, other, torch.ones(count // ranks, dtype=kind, device=device), rank, ranks)

    def cut(self, operation: str, size: int, dtype: str) -> Buffers:
        """Return views of the right length for an operation."""
        count = traffic.elements(operation, size, self.ranks, dtype) if operation != traffic.COPY else len(self.whole)
        parts = (self.whole[:count], self.other[:count], self.part[: count // self.ranks])
        return Buffers(*parts, self.rank, self.ranks)

    @property
    def bytes(self) -> int:
        """The size of `whole`."""
        return int(self.whole.numel() * self.whole.element_size())

    @property
    def wholes(self) -> list[torch.Tensor]:
        """`whole` in one part per rank."""
        return list(self.whole.chunk(self.ranks))

    @property
    def others(self) -> list[torch.Tensor]:
        """`other` in one part per rank."""
        return list(self.other.chunk(self.ranks))


def tasks(operations: tuple[str, ...], dtype: str, size: int, *, in_place: bool) -> list[Task]:
    """Return the tasks of all sized operations; with `in_place`, both variants where torch has them."""
    found = []
    for name in operations:
        operation = traffic.OPERATIONS[name]
        if not operation.sized:
            continue
        places = {"in": ["in"], "out": ["out"], "both": ["out", "in"] if in_place else ["out"]}[operation.place]
        found += [Task(name, dtype, place, size) for place in places]
    return found
