"""The saves that are being written in the background, and the memory for them. Every rank makes the same calls in the
same order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.format.buffer import Buffer
from phalanx.train.checkpoint.peers import Peers
from phalanx.train.checkpoint.saver import REMOVED, Save, SaveRequest
from phalanx.train.checkpoint.shares import Chunk

_NICE = 10  # added to the niceness of the writing thread


class SaveQueue:
    """Saves in progress, oldest first. `folder`: its path, for messages."""

    def __init__(self, peers: Peers, folder: str, buffers: int, say: Callable[[str], None]) -> None:
        self._peers = peers
        self._folder = folder
        self._say = say
        self.free = [Buffer() for _ in range(buffers)]
        self._saves: deque[Save] = deque()
        # A permanent thread: starting one takes longer than copying a small state. Python joins it at exit, so a
        # script that ends without closing still completes its saves.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=lower_priority)
        self._failure: CheckpointError | None = None  # of the newest save that has ended
        self._reported: tuple[str, ...] = ()  # the reasons of the last reported failure

    def start(self, order: SaveRequest, chunks: Sequence[Chunk]) -> None:
        """Copy the chunks, and write them in the background. There must be a free buffer."""
        buffer = self.free[-1]
        save = Save(order, buffer, buffer.take(chunks))
        self._saves.append(save)
        self.free.pop()
        save.start(self._writer)

    @property
    def under_way(self) -> int:
        """Number of saves that this rank is still writing."""
        return sum(save.under_way for save in self._saves)

    def wait(self) -> None:
        """Wait until all saves are on the disk. Raises if the newest one has failed."""
        while self._saves:
            self.finish_oldest(tell=len(self._saves) > 1)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish_all(self) -> None:
        """Wait until all saves are on the disk, and report those that have failed."""
        while self._saves:
            self.finish_oldest()

    def close(self, patience: float, *, needless: bool) -> None:
        """Close without the other ranks, and release the memory.

        patience  seconds for other ranks to write
        needless  data that this rank has not written yet need not be written
        """
        limit = time.monotonic() + patience
        for save in self._saves if needless else ():
            save.needless.set()
        for save in self._saves:
            save.written.wait()
            save.join(max(0.0, limit - time.monotonic()))
            save.give_up.set()
        self._writer.shutdown()
        self.free += [save.buffer for save in self._saves]
        self._saves.clear()
        for buffer in self.free:
            buffer.close()

    def settle(self) -> None:
        """Conclude the saves that are complete on all ranks, with one small exchange."""
        if not self._saves:
            return
        done = [[save.failure, save.outcome] for save in takewhile(lambda save: not save.under_way, self._saves)]
        answers = self._peers.gather(done, all=True)
        for place, save in enumerate(self._saves):
            if any(one[place][0] for one in answers if len(one) > place):
                save.give_up.set()  # on a full disk the rank may not have been able to write even the reason
        for ended in zip(*answers, strict=False):  # those that are complete on all ranks
            self._conclude([failure for failure, _ in ended], ended[0][1])

    def finish_oldest(self, *, tell: bool = True) -> None:
        """Wait for the oldest save. It stays in the queue until all ranks have answered, because one of them may be
        dead.
        """
        save = self._saves[0]
        save.written.wait()
        failures = self._peers.gather(save.failure, all=True)
        if any(failures):
            save.give_up.set()
        save.join()
        self._conclude(failures, self._peers.broadcast(save.outcome), tell=tell)

    def _conclude(self, failures: Sequence[str], outcome: str, *, tell: bool = True) -> None:
        save = self._saves.popleft()
        self.free.append(save.buffer)
        self._failure = None
        if not outcome:
            self._reported = ()
            return
        if self._peers.rank == 0:
            # No rank writes there any more.
            shutil.rmtree(save.order.staging, ignore_errors=True)
        step = save.order.values.step
        found = causes(failures)
        reasons = tuple(dict.fromkeys(found.values())) or (outcome,)
        lines = [f"rank {rank}: {failure}" for rank, failure in found.items()]
        self._failure = CheckpointError(
            f"the checkpoint of step {step} was not written",
            details=[f"in {self._folder}", *(lines[:8] or [outcome])],
            fix="check the disk; the training continues, and earlier checkpoints are not affected",
        )
        if tell and self._peers.rank == 0:
            again = f"the checkpoint of step {step} was not written either: {'; '.join(reasons[:2])}"
            self._say(f"phalanx: {again if reasons == self._reported else self._failure}")
            self._reported = reasons


def causes(failures: Sequence[str]) -> dict[int, str]:
    """Return by rank why a save failed, without the ranks that found its folder removed because another rank failed."""
    failed = {rank: failure for rank, failure in enumerate(failures) if failure}
    return {rank: failure for rank, failure in failed.items() if failure != REMOVED} or failed


def lower_priority() -> None:
    """Lower the priority of this thread only: on Linux each thread has its own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
