"""Tensors in a memfd: one process fills it, others of the same user and host read it.

A memfd has no name, so it is freed when the process that created it ends, however it ends.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import torch

from phalanx.contract import shared_memory
from phalanx.errors import JoinError
from phalanx.train.elastic import staged_copies
from phalanx.train.elastic.staged_copies import memory
from phalanx.worker.process_group import objects

ALIGNED = 64  # bytes, like torch's own memory
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # single page faults take longer than the copy
_NAME = "phalanx-handover"  # name that the kernel shows


class MemfdTensors:
    """Tensors that were copied to a memfd. A reader needs only `address`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], label: dict[str, object]) -> None:
        self._fd = shared_memory.create_unsealed(_NAME)
        try:
            fill = _copied if any(tensor.is_cuda for tensor in tensors.values()) else _written
            places, end = fill(self._fd, tensors)
            text = objects.encode({**label, "places": places})
            _write(self._fd, memoryview(text))
            shared_memory.seal(self._fd)
        except BaseException:
            self.close()
            raise
        self.address = f"{os.getpid()} {self._fd} {end} {len(text)}"

    def close(self) -> None:
        """Close the memfd; readers that have opened it keep it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PackingThread:
    """A thread that fills a memfd.

    packing = PackingThread(lambda: MemfdTensors(tensors, label))
    packing.result()
    packing.close()
    """

    def __init__(self, fill: Callable[[], MemfdTensors]) -> None:
        self._future: Future[MemfdTensors] = Future()
        # A daemon, unlike the threads of an executor: a copy that never ends must not keep a process alive.
        threading.Thread(target=self._run, args=(fill,), name="phalanx-handover", daemon=True).start()

    def _run(self, fill: Callable[[], MemfdTensors]) -> None:
        try:
            self._future.set_result(fill())
        except BaseException as error:  # `result` raises it
            self._future.set_exception(error)

    def result(self) -> None:
        """Wait until the memfd is filled; raise the exception of the thread."""
        self._future.result()

    def close(self) -> None:
        """Close the memfd, as soon as it is filled."""
        self._future.add_done_callback(_closed)


def _closed(filled: Future[MemfdTensors]) -> None:
    if filled.exception() is None:
        filled.result().close()


class OpenedMemfd:
    """The memfd of another process.

        with OpenedMemfd(address) as memfd:
            memfd.label
            memfd.read(targets)

    If no other process reads it, `memfd.tensor(name, …)` returns its memory without a copy.
    """

    def __init__(self, address: str) -> None:
        pid, fd, start, length = map(int, address.split())
        try:
            self._fd = shared_memory.open_of(pid, fd, _NAME, size=start + length)
        # the address comes from the store, and might refer to anything
        except shared_memory.ForeignMemoryError as error:
            raise JoinError(f"what process {pid} hands over is not the state of a training: {error}") from None
        except OSError as error:
            raise JoinError(
                f"the state that process {pid} hands over cannot be read: {error.strerror}",
                details=["it has ended, or /proc hides it from other processes of its user"],
            ) from None
        self.label = objects.decode(os.pread(self._fd, length, start))
        self._size = start
        self._memory: mmap.mmap | None = None

    def names(self) -> Iterable[str]:
        """Return the names of the tensors."""
        return self.label["places"]  # type: ignore[no-any-return]

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in the memory of the memfd."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._memory is None:
            self._memory = mmap.mmap(self._fd, self._size, flags=mmap.MAP_SHARED | _POPULATE)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self.label["places"][name]).view(shape)

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors to targets of the same names. Skip targets that are already in the memfd."""
        places = self.label["places"]
        staged_copies.read(self._fd, [(targets[name], places[name]) for name in self.names() if targets[name].is_cuda])
        for name in self.names():
            place, target = places[name], targets[name].detach()
            if target.is_cuda or self._is_own(target):
                continue
            near = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            view = memory(near)
            while view:
                count = os.preadv(self._fd, [view], place)
                if not count:
                    raise JoinError(f"the state that was handed over ends in the middle of {name}")
                view, place = view[count:], place + count
            if near is not target:
                target.copy_(near)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        if self._memory is None or tensor.is_cuda:
            return False
        start = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        return bool(start <= tensor.data_ptr() < start + self._size)

    def __enter__(self) -> OpenedMemfd:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _written(fd: int, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Write the tensors; return the position of each in the file, and the end of the last."""
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = end
        packed = tensor.detach().contiguous()  # held until it is written
        end += _write(fd, memory(packed))
        end += _write(fd, memoryview(bytes(-end % ALIGNED)))
    return places, end


def _copied(fd: int, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Do the same for tensors on a GPU."""
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = end
        end += tensor.nbytes + -tensor.nbytes % ALIGNED
    if end:
        os.posix_fallocate(fd, 0, end)  # otherwise writing would allocate it page by page
    staged_copies.write(fd, [(tensor, places[name]) for name, tensor in tensors.items()])
    os.lseek(fd, end, os.SEEK_SET)
    return places, end


def _write(fd: int, view: memoryview) -> int:
    rest = view
    while rest:
        rest = rest[os.write(fd, rest) :]
    return len(view)
