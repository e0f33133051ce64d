"""Regions: memory that all ranks of a group have mapped. A tensor in one is reduced in place, in one pass.

Each rank creates its own, and later all ranks share them together. A region has no name and no file: the others open it
through /proc of the process that created it, like the memory of the group.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from phalanx.collectives.engines.engine import CallKind, EngineCall, Op, Reduction
from phalanx.contract import shared_memory

# bytes: smaller tensors are as fast through the group's slots. Must equal the value in native/phx.h
MIN_BYTES = 1 << 20
_NAME = "phalanx-region"  # as the kernel shows it
_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE


class Region(mmap.mmap):
    """A memory map. Tensors on it (`torch.frombuffer`) keep it alive. It is unmapped with the last one, together with
    the maps of the others' regions.
    """

    descriptor: int = -1  # closed once it is shared
    others: Sequence[torch.Tensor | None] = ()  # the region of each other rank
    remove: Callable[[], None] | None = None

    @classmethod
    def create(cls, size: int) -> Region:
        """Create a region of `size` bytes."""
        fd = shared_memory.create(_NAME, size)
        try:
            made = cls(fd, size, flags=_FLAGS)
        except BaseException:  # also KeyboardInterrupt: the descriptor must not leak
            os.close(fd)
            raise
        made.descriptor = fd
        return made

    @property
    def address(self) -> int:
        """Where it is mapped in this process."""
        return int(torch.frombuffer(self, dtype=torch.uint8).data_ptr())

    def close_descriptor(self) -> None:
        """Close the descriptor, so that no other process can open the region. Existing maps stay."""
        fd, self.descriptor = self.descriptor, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self.remove is not None:
            self.remove()
        self.close_descriptor()


class RegionEngine(Protocol):
    """An engine that supports regions."""

    rank: int
    size: int

    def run(self, call: EngineCall) -> None:
        """Run a call and wait for it."""

    def add_region(self, size: int, places: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Add a region, see ShmEngine."""


def region_engine(group: Any) -> RegionEngine | None:
    """Return the engine of a process group if its ranks share memory, else None."""
    engine: Any = getattr(group, "_engine", None)
    return engine if hasattr(engine, "add_region") and engine.size > 1 else None


def share(engine: RegionEngine, made: Sequence[Region | None], timeout: float) -> bool:
    """Share regions, one list of the same sizes per rank, called by all ranks together. Return whether all ranks have
    mapped all of them. If not, or if a rank could not create one, they stay ordinary memory.
    """
    if not made:
        return False
    regions = [one for one in made if one is not None]
    own = torch.tensor(
        [(os.getpid(), one.descriptor, len(one), one.address) if one is not None else (0, -1, 0, 0) for one in made]
    )
    published = torch.empty((engine.size, *own.shape), dtype=own.dtype)
    engine.run(EngineCall(CallKind.ALL_GATHER, [own], [published], timeout=timeout))
    mapped: list[list[torch.Tensor | None]] | None = None
    with contextlib.suppress(OSError, RuntimeError):  # torch raises RuntimeError if it cannot map
        if len(regions) < len(made):
            raise OSError("this rank has not made all of them")
        mapped = [
            [
                _open(*published[rank, number].tolist(), of=one) if rank != engine.rank else None
                for rank in range(engine.size)
            ]
            for number, one in enumerate(regions)
        ]
    all_mapped = torch.tensor([mapped is not None], dtype=torch.uint8)
    engine.run(EngineCall(CallKind.ALL_REDUCE, outs=[all_mapped], reduction=Reduction(Op.MIN), timeout=timeout))
    for one in regions:
        one.close_descriptor()
    if mapped is None or not all_mapped.item():
        return False
    for number, (one, others) in enumerate(zip(regions, mapped, strict=True)):
        places = [
            (one.address if other is None else other.data_ptr(), int(published[rank, number, 3]))
            for rank, other in enumerate(others)
        ]
        one.others, one.remove = others, engine.add_region(len(one), places)
    return True


def _open(pid: int, descriptor: int, size: int, _: int, *, of: Region) -> torch.Tensor:
    if size != len(of):
        raise OSError("another rank's is of another size")
    fd = shared_memory.open_of(pid, descriptor, _NAME, size=size)
    try:
        # Not mmap.mmap, which keeps a descriptor: there is one of these per bucket and rank.
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(fd)
