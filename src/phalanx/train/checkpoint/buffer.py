"""Memory into which a share of the state is copied, so that training goes on meanwhile. Used again and again."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.train.checkpoint.shares import Chunk
from phalanx.train.checkpoint.tensorfile import order


@dataclass(frozen=True)
class Placed:
    """A chunk and where in the buffer it lies."""

    chunk: Chunk
    begin: int
    end: int


class Buffer:
    """Anonymous memory, which both torch and a file can take without a copy; pinned where a GPU copies into it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, chunks: Sequence[Chunk]) -> list[Placed]:
        """Copy everything in. When this returns, the originals may change."""
        placed = []
        end = 0
        for place in order([chunk.part.element_size() for chunk in chunks]):
            begin, end = end, end + chunks[place].part.numel() * chunks[place].part.element_size()
            placed.append(Placed(chunks[place], begin, end))
        on_gpu = any(chunk.part.is_cuda for chunk in chunks)
        self._reserve(end, on_gpu)
        for item in placed:
            part = item.chunk.part
            self._bytes[item.begin : item.end].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return placed

    def view(self, begin: int, end: int) -> memoryview:
        return memoryview(self._memory or b"")[begin:end]

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._memory = None  # unmapped once the last view of it is gone
        self._pinned = False

    def _reserve(self, size: int, pin: bool) -> None:
        if size > len(self._bytes):
            self.close()
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pin and not self._pinned and size:
            # Memory that cannot be pinned (a limit of the machine) is still memory, only slower.
            failed = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0)
            self._pinned = int(failed) == 0
