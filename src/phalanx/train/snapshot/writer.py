"""Writes this rank's part of each snapshot, to two memories in turn: while one is written, the other has the part of
the previous snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import msgspec
import torch

from phalanx.errors import LaunchError
from phalanx.train.checkpoint import randomness
from phalanx.train.checkpoint.format.buffer import Placed
from phalanx.train.checkpoint.save_queue import lower_priority
from phalanx.train.checkpoint.shares import Chunk
from phalanx.train.snapshot.copying import ShardCopier
from phalanx.train.snapshot.part import Part, Writer
from phalanx.worker.snapshot_memory import SnapshotMemoryClient

_SMALL = 1 << 20  # bytes whose checksums take less time than a switch to a thread


class SnapshotWriter:
    """Writes one part at a time, in a thread unless it is small."""

    def __init__(
        self, client: SnapshotMemoryClient, rank: int, device: torch.device, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self._client = client
        self._names = [f"{rank}.{turn}" for turn in (0, 1)]
        self._generators = generators
        self.memories = [Writer(partial(client.lend, name)) for name in self._names]
        self.turn = 0  # the memory to write next
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot", initializer=partial(_begin_thread, device))
        self.copier = ShardCopier(self._thread, shares_cores=device.type == "cpu")
        self._job: Future[None] | None = None
        self._writing = False  # the job writes a part; otherwise it allocates memory
        self._prepared = False

    def prepare(self, chunks: Sequence[Chunk]) -> bool:
        """Start to allocate memory for parts like this one. Return False if that was done before."""
        if self._prepared:
            return False
        self._prepared = True
        self._job = self._start(partial(self._allocate, chunks), chunks)
        return True

    def write(self, part: Part, chunks: Sequence[Chunk], carried: Callable[[], None] | None) -> bool:
        """Copy the chunks and write the part; shards are copied from the next forward on. Return False if there is no
        memory.

        `carried` is called in the thread when the part is complete.
        """
        random = randomness.taken(self._generators)
        memory, small = self.memories[self.turn], _is_small(chunks)
        self.copier.begin()
        try:
            placed = memory.take(chunks, overlap=not small)
        except (LaunchError, OSError) as error:
            self._job = _done(partial(_raise, error))
            return False
        finish = partial(_finish, memory, part, placed, random, carried)
        if any(chunk.sharded for chunk in chunks) and not small:
            self._job = self.copier.later(memory, finish)
        else:
            self._job = self._thread.submit(finish) if carried else self._start(finish, chunks)
        self._writing = True
        return True

    @property
    def started(self) -> bool:
        """Whether there is a job for which `end` was not called."""
        return self._job is not None

    @property
    def done(self) -> bool:
        """Whether the current job is done, with or without success."""
        return self._job is None or self._job.done()

    @property
    def failure(self) -> str:
        """Why the current job has failed; empty if it has not, or is not done."""
        return _reason(self._job.exception()) if self._job is not None and self._job.done() else ""

    def end(self) -> bool:
        """End the current job, which is done on all ranks. Return True if it has written a part: the next one is
        written to the other memory."""
        self._job = None
        if not self._writing:
            return False
        self._writing = False
        self.copier.end()
        self.turn = 1 - self.turn
        return True

    def wait(self) -> None:
        """Wait until the current part is written."""
        self.copier.forward()
        if self._job is not None:
            wait([self._job])

    def give_up(self) -> None:
        """Stop writing, and release the memory without a complete part."""
        self.copier.drop()
        self._abandon()
        if self.done:
            self._release()
        else:  # after the thread has stopped writing there; nothing waits for that
            self._thread.submit(self._release)

    def close(self, patience: float = 0.0) -> None:
        """Close. An incomplete part is dropped. `patience`: seconds to wait for a nearly complete one."""
        if patience:
            self.copier.forward()  # nothing changes the shards any more
        self.copier.drop()
        wait([self._job] if self._job is not None else [], patience)
        self._abandon()
        self._thread.shutdown()
        for memory in self.memories:
            memory.close()

    def _abandon(self) -> None:
        for memory in self.memories:
            memory.abandoned = True

    def _release(self) -> None:
        with contextlib.suppress(LaunchError):
            for turn, memory in enumerate(self.memories):
                if turn == self.turn or not memory.sealed:  # the other one may still be needed
                    memory.close()
                    self._client.drop(self._names[turn])

    def _allocate(self, chunks: Sequence[Chunk]) -> None:
        for turn in (self.turn, 1 - self.turn):
            self.memories[turn].prepare(chunks)

    def _start(self, call: Callable[[], None], chunks: Sequence[Chunk]) -> Future[None]:
        """Call in the thread, or at once if that is as fast."""
        return _done(call) if _is_small(chunks) else self._thread.submit(call)


def _begin_thread(device: torch.device) -> None:
    lower_priority()
    # otherwise pinning would create a context on the first GPU, which belongs to another rank
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _finish(
    memory: Writer,
    part: Part,
    placed: Sequence[Placed],
    random: dict[str, Any],
    carried: Callable[[], None] | None,
) -> None:
    memory.finish(msgspec.structs.replace(part, random=randomness.packed(random)), placed)
    if carried is not None:
        carried()


def _is_small(chunks: Sequence[Chunk]) -> bool:
    size = sum(chunk.part.nbytes for chunk in chunks)
    return size <= _SMALL and not any(chunk.part.is_cuda for chunk in chunks)


def _done(call: Callable[[], None]) -> Future[None]:
    """Call at once, and return a completed future."""
    job: Future[None] = Future()
    try:
        call()
        job.set_result(None)
    except Exception as error:  # `SnapshotWriter.failure` reports it
        job.set_exception(error)
    return job


def _reason(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _raise(error: Exception) -> None:
    raise error
