"""Memory that every rank of a group has mapped: a tensor that lies in it is reduced where it is, in one pass.

Made by each rank by itself, and shown to the others later, by all ranks together. No name, no file: the others open it
through the process that made it, as they did with the memory of the group.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from phalanx.collectives.engines.engine import CallKind, EngineCall, Op, Reduction

LEAST = 1 << 20  # bytes: less goes through the slots of the group as fast. The number is that of native/regions.c
_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE


class Region(mmap.mmap):
    """A tensor on it (`torch.frombuffer`) holds it; with the last one it ends, and what it has mapped of others."""

    descriptor: int = -1  # until it was shown
    others: Sequence[torch.Tensor | None] = ()  # that of each other rank
    take_back: Callable[[], None] | None = None

    @classmethod
    def made(cls, size: int) -> Region:
        fd = os.memfd_create("phalanx-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            made = cls(fd, size, flags=_FLAGS)
        except BaseException:
            os.close(fd)
            raise
        made.descriptor = fd
        return made

    @property
    def address(self) -> int:
        return int(torch.frombuffer(self, dtype=torch.uint8).data_ptr())

    def hide(self) -> None:
        """Nobody can open it any more; who has, has it."""
        fd, self.descriptor = self.descriptor, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self.take_back is not None:
            self.take_back()
        self.hide()


class Lending(Protocol):
    """An engine that knows of regions."""

    rank: int
    size: int

    def run(self, call: EngineCall) -> None: ...

    def lend(self, size: int, places: Sequence[tuple[int, int]]) -> Callable[[], None]: ...


def lender(group: Any) -> Lending | None:
    """What a process group stands on, where its ranks share memory."""
    engine: Any = getattr(group, "_engine", None)
    return engine if hasattr(engine, "lend") and engine.size > 1 else None


def show(engine: Lending, made: Sequence[Region | None], timeout: float) -> bool:
    """By all ranks together, with as many regions of the same sizes. Whether all have mapped all of them; if not, or if
    a rank has none where others have one, they are memory like any other."""
    if not made:
        return False
    regions = [one for one in made if one is not None]
    own = torch.tensor(
        [(os.getpid(), one.descriptor, len(one), one.address) if one is not None else (0, -1, 0, 0) for one in made]
    )
    told = torch.empty((engine.size, *own.shape), dtype=own.dtype)
    engine.run(EngineCall(CallKind.ALL_GATHER, [own], [told], timeout=timeout))
    mapped: list[list[torch.Tensor | None]] | None = None
    with contextlib.suppress(OSError, RuntimeError):  # which torch raises where it cannot map
        if len(regions) < len(made):
            raise OSError("this rank has not made all of them")
        mapped = [
            [
                _opened(*told[rank, number].tolist(), of=one) if rank != engine.rank else None
                for rank in range(engine.size)
            ]
            for number, one in enumerate(regions)
        ]
    agreed = torch.tensor([mapped is not None], dtype=torch.uint8)
    engine.run(EngineCall(CallKind.ALL_REDUCE, outs=[agreed], reduction=Reduction(Op.MIN), timeout=timeout))
    for one in regions:
        one.hide()
    if mapped is None or not agreed.item():
        return False
    for number, (one, others) in enumerate(zip(regions, mapped, strict=True)):
        places = [
            (one.address if other is None else other.data_ptr(), int(told[rank, number, 3]))
            for rank, other in enumerate(others)
        ]
        one.others, one.take_back = others, engine.lend(len(one), places)
    return True


def _opened(pid: int, descriptor: int, size: int, _: int, *, of: Region) -> torch.Tensor:
    if size != len(of):
        raise OSError("another rank's is of another size")
    fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != size:
            raise OSError("it is not what the other rank has told of")
        # Not by mmap.mmap, which keeps a descriptor: there are as many of these as buckets times ranks.
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(fd)
