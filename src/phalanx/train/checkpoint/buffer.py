"""Memory into which a share of the state is copied, so that training goes on meanwhile. Used again and again."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.train.checkpoint.shares import Chunk
from phalanx.train.checkpoint.tensorfile import order

_LINE = 64  # bytes that a processor moves as one


@dataclass(frozen=True)
class Placed:
    """A chunk and where in the buffer it lies."""

    chunk: Chunk
    begin: int
    end: int


def _anonymous(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Buffer:
    """Memory which both torch and a file can take without a copy; pinned where a GPU copies into it.

    `make` gives so many bytes of it, of which the first `head` are not ours.
    """

    def __init__(self, make: Callable[[int], mmap.mmap] = _anonymous, head: int = 0) -> None:
        self._make = make
        self._head = head
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._layout: list[tuple[int, torch.dtype, torch.Size]] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: list[Any] = []  # of GPUs, not known to be through
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []  # target and source, not copied yet
        self._sides: dict[torch.device, Any] = {}  # a stream per GPU, for copies beside the training

    def prepare(self, chunks: Sequence[Chunk]) -> list[Placed]:
        """Memory for chunks like these, if there is not enough: to have it takes longer than to copy."""
        placed = []
        end = self._head
        for place in order([chunk.part.element_size() for chunk in chunks]):
            # In the file there is no gap. Here there is, or one small tensor would make all that follow slow to copy.
            begin = end + -end % _LINE
            end = begin + chunks[place].part.nbytes
            placed.append(Placed(chunks[place], begin, end))
        self._reserve(end, any(chunk.part.is_cuda for chunk in chunks))
        return placed

    def take(self, chunks: Sequence[Chunk], *, overlap: bool = False) -> list[Placed]:
        """Copy everything in. When this returns, the originals may change; `ready` has to be asked before `view`.

        A GPU copies in the stream of the training: after the update that was asked for before, and before the next
        one. So nobody waits for it here, and the training's thread is free to ask for the next step.

        `overlap`: shards are left to `start_copies` and `copy_rest`, beside the next forward and backward.
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
        """The GPU part of what `take` left, each GPU in a stream of its own: behind everything that the current stream
        was asked for, and beside what it is asked for next. The originals must not change before `ready` returns."""
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
                        part.record_stream(side)  # its memory is not given to others while it is being read
            self._record(side)

    def copy_rest(self) -> None:
        """The CPU part of what `take` left; in any thread."""
        later, self._later = self._later, []
        for target, part in later:
            _copy(target, part)

    def _record(self, stream: Any) -> None:
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
        self._copies.append(done)

    def ready(self) -> None:
        """Wait for the GPUs' copies."""
        while self._copies:
            self._copies.pop().synchronize()

    def view(self, begin: int, end: int) -> memoryview:
        return memoryview(self._memory or b"")[begin:end]

    def close(self) -> None:
        self.ready()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout, self._tensors = [], []
        self._memory = None  # unmapped once the last view of it is gone
        self._pinned = False

    def _targets(self, placed: Sequence[Placed]) -> list[torch.Tensor]:
        """The memory as tensors like theirs. Kept, for with many small ones it takes longer to make than to copy."""
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
            # Not for the forks of a loader: the next copy would have to divide every page from theirs.
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                with contextlib.suppress(OSError, AttributeError):  # a kernel that knows no such thing
                    self._memory.madvise(getattr(mmap, advice))
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pin and not self._pinned and size:
            # Memory that cannot be pinned (a limit of the machine) is still memory, only slower.
            failed = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0)
            self._pinned = int(failed) == 0


def _copy(target: torch.Tensor, part: torch.Tensor) -> None:
    """By one thread: torch would start a team of them for the thread that asks, beside the one that computes."""
    if part.is_contiguous() and part.nbytes:
        ctypes.memmove(target.data_ptr(), part.data_ptr(), part.nbytes)
    else:
        target.copy_(part)
