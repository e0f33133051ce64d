"""Reusable memory to which a rank copies its share of the state, so that training can continue."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.train.checkpoint.format.tensorfile import order
from phalanx.train.checkpoint.shares import Chunk

_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Placed:
    """A chunk, and its position in the buffer."""

    chunk: Chunk
    begin: int
    end: int


def _anonymous(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Buffer:
    """Memory that torch and files use without a copy; pinned if a GPU copies to it.

    `make(size)` allocates it; the first `head` bytes are not used.
    """

    def __init__(self, make: Callable[[int], mmap.mmap] = _anonymous, head: int = 0) -> None:
        self._make = make
        self._head = head
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._layout: list[tuple[int, torch.dtype, torch.Size]] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: list[Any] = []  # events of copies by GPUs that may not be complete
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []  # target and source, not copied yet
        self._sides: dict[torch.device, Any] = {}  # a stream per GPU, for copies during the training

    def prepare(self, chunks: Sequence[Chunk]) -> list[Placed]:
        """Allocate memory for chunks like these, if there is not enough: that takes longer than the copy."""
        placed = []
        end = self._head
        for place in order([chunk.part.element_size() for chunk in chunks]):
            # Unlike in the file, chunks are aligned here: otherwise one small tensor would slow down all following
            # copies.
            begin = end + -end % _LINE
            end = begin + chunks[place].part.nbytes
            placed.append(Placed(chunks[place], begin, end))
        self._reserve(end, any(chunk.part.is_cuda for chunk in chunks))
        return placed

    def take(self, chunks: Sequence[Chunk], *, overlap: bool = False) -> list[Placed]:
        """Copy the chunks. When this returns, the originals may change; call `ready` before `view`.

        A GPU copies in the stream of the training: after the update that was launched before, and before the next one.
        So this does not wait for the GPU, and the training thread can launch the next step.

        `overlap`: leave shards to `start_copies` and `copy_rest`, during the next forward and backward.
        """
        placed = self.prepare(chunks)
        gpus = set()
        self._later = []
        for item, target in zip(placed, self._targets(placed), strict=True):
            part = item.chunk.part
            if overlap and item.chunk.sharded:
                self._later.append((target, part))
                continue
            target.copy_(part, non_blocking=part.is_cuda)
            gpus |= {part.device} if part.is_cuda else set()
        for gpu in gpus:
            self._record(torch.cuda.current_stream(gpu))
        return placed

    def start_copies(self) -> None:
        """Start to copy the shards on GPUs that `take` left, each GPU in a separate stream: after all earlier work of
        the current stream, and concurrently with later work. The originals must not change before `ready` returns.
        """
        far = [(target, part) for target, part in self._later if part.is_cuda]
        self._later = [(target, part) for target, part in self._later if not part.is_cuda]
        for gpu in {part.device for _, part in far}:
            side = self._sides.get(gpu) or torch.cuda.Stream(gpu)
            self._sides[gpu] = side
            side.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(side):
                for target, part in far:
                    if part.device == gpu:
                        target.copy_(part, non_blocking=True)
                        part.record_stream(side)  # its memory is not reused while it is read
            self._record(side)

    def copy_rest(self) -> None:
        """Copy the shards on the CPU that `take` left. Any thread may call it."""
        later, self._later = self._later, []
        for target, part in later:
            _copy(target, part)

    def _record(self, stream: Any) -> None:
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
        self._copies.append(done)

    def ready(self) -> None:
        """Wait for the copies of GPUs."""
        while self._copies:
            self._copies.pop().synchronize()

    def view(self, begin: int, end: int) -> memoryview:
        """Return a part of the memory."""
        return memoryview(self._memory or b"")[begin:end]

    def close(self) -> None:
        """Unpin and free the memory."""
        self.ready()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout, self._tensors = [], []
        self._memory = None  # unmapped with the last view of it
        self._pinned = False

    def _targets(self, placed: Sequence[Placed]) -> list[torch.Tensor]:
        """Return the memory as tensors like the chunks. Cached: creating many small tensors takes longer than
        copying.
        """
        layout = [(item.begin, item.chunk.part.dtype, item.chunk.part.shape) for item in placed]
        if layout != self._layout:
            self._layout = layout
            self._tensors = [
                self._bytes[item.begin : item.end].view(dtype).view(shape)
                for item, (_, dtype, shape) in zip(placed, layout, strict=True)
            ]
        return self._tensors

    def _reserve(self, size: int, pin: bool) -> None:
        if size > len(self._bytes):
            self.close()
            self._memory = self._make(size)
            # Not inherited by the workers of a loader: every page of the next copy would be copied on write.
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                with contextlib.suppress(OSError, AttributeError):  # an older kernel
                    self._memory.madvise(getattr(mmap, advice))
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pin and not self._pinned and size:
            # Memory that cannot be pinned, because of a limit, also works, but is slower.
            failed = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0)
            self._pinned = int(failed) == 0


def _copy(target: torch.Tensor, part: torch.Tensor) -> None:
    """Copy with one thread: torch would start a thread pool for this thread, besides that of the training."""
    if part.is_contiguous() and part.nbytes:
        ctypes.memmove(target.data_ptr(), part.data_ptr(), part.nbytes)
    else:
        target.copy_(part)
