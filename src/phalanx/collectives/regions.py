"""Memory that every rank of a group has mapped: a tensor that lies in it is reduced where it is, in one pass.

Made by each rank by itself, and shown to the others later, by all ranks together. No name, no file: the others open it
through the process that made it, as they did with the memory of the group.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

LEAST = 1 << 20  # bytes: less goes through the slots of the group as fast. The number is that of native/regions.c
_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE


class Region(mmap.mmap):
    """A tensor on it (`torch.frombuffer`) holds it; with the last one it ends, and what it has mapped of others."""

    descriptor: int = -1  # until it was shown
    others: Sequence[mmap.mmap] = ()
    _forget: Callable[[], None] | None = None

    @classmethod
    def made(cls, size: int) -> Region:
        fd = os.memfd_create("phalanx-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            made = cls(fd, size, flags=_FLAGS)
        except BaseException:
            os.close(fd)
            raise
        made.descriptor = fd
        return made

    @property
    def address(self) -> int:
        return torch.frombuffer(self, dtype=torch.uint8).data_ptr()

    def hide(self) -> None:
        """Nobody can open it any more; who has, has it."""
        fd, self.descriptor = self.descriptor, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self._forget is not None:
            self._forget()
        self.hide()
