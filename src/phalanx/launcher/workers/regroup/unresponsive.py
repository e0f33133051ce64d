"""Survivors that do not join the new group: gloo may wait forever in an operation whose connections are cut.

A send to a dead rank may stay in a queue, and its waiter is never woken. Such a process can only be replaced. Nothing
is lost if another rank has the same state; otherwise another thread of the process copies the state to memory. A rank
that waits for its GPU computes, as seen from here: it reports itself that it is blocked (`train/elastic/gpu_wait.py`).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx.contract.messages import worker_messages
from phalanx.forkserver import linux
from phalanx.launcher.workers.stopper import Stopper
from phalanx.launcher.workers.worker import Worker
from phalanx.launcher.workers.worker_channels import WorkerChannels
from phalanx.launcher.workers.workers import Workers

PATIENCE = 0.4  # seconds without CPU use
ON_GPU = 3.0  # the same for a rank on a GPU, which waits until NCCL's abort has ended its kernels
LAST = 15.0  # the same if no other rank has the state: everything since the last snapshot is lost
SAVING = 120.0  # the same while it saves the state: that may be tens of gigabytes
_INTERVAL = 0.1  # seconds between two checks of which ranks have joined


@dataclass
class _Look:
    used: float  # seconds of CPU
    since: float  # when it was last seen to use any


class Unresponsive:
    """Finds workers of one node that do not respond, since the regroup began."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}

    def among(self, missing: Iterable[int], patience: float) -> list[int]:
        """Return the processes among these that have not computed for `patience` seconds."""
        now = time.monotonic()
        return [pid for pid in missing if self._still(pid, now) > patience]

    def excuse(self, seconds: float) -> None:
        """Do not count these seconds: this process was busy, and may not have read yet that a worker has joined."""
        for look in self._looks.values():
            look.since += max(0.0, seconds)

    def _still(self, pid: int, now: float) -> float:
        """Return for how many seconds its main thread has neither computed nor been runnable."""
        seen = linux.thread(pid)
        if seen is None:
            return 0.0
        asleep, used = seen
        look = self._looks.get(pid)
        if look is None or not asleep or used > look.used:
            look = self._looks[pid] = _Look(used, now)
        return now - look.since


class UnresponsiveWatch:
    """Kills workers that cannot leave the old group and so block the new one. Saves their state first if needed."""

    def __init__(
        self, workers: Workers, channels: WorkerChannels, stopper: Stopper, note: Callable[[str], None]
    ) -> None:
        self._workers = workers
        self._channels = channels
        self._stopper = stopper
        self._note = note
        self._generation: int | None = None  # generation that workers should join; None: no regroup is due
        self._saving: dict[int, float] = {}  # processes that copy their state to memory, and since when
        self._killed: set[str] = set()  # names of workers, whose end may take seconds on a GPU
        self._task: asyncio.Task[None] | None = None

    def start(self, generation: int) -> None:
        """Watch until all survivors have joined this generation."""
        self.cancel()
        self._generation = generation
        self._task = asyncio.get_running_loop().create_task(self._watch(generation))

    def cancel(self) -> None:
        """Stop watching: the workers wait for other nodes, or the attempt is over."""
        self._generation = None
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, generation: int) -> None:
        unresponsive, asked = Unresponsive(), set[int]()
        while missing := {worker.pid: name for name, worker in self._workers.living if self._is_missing(worker)}:
            living = [worker for _, worker in self._workers.living]
            safe = any(worker.generations.holds and worker.generations.entered == generation for worker in living)
            patience = ON_GPU if any(worker.seat.slot.device is not None for worker in living) else PATIENCE
            for pid in unresponsive.among(missing.keys() - asked, patience) if not safe else ():
                asked.add(pid)
                self._saving[pid] = time.monotonic()
                self._channels.send(pid, worker_messages.Rescue())
            silent = unresponsive.among(missing, patience if safe else LAST)
            for pid, name in missing.items():
                blocked = self._workers[name].generations.blocked and name not in self._killed
                if not (blocked or pid in silent) or (not safe and self._is_saving(pid)):
                    continue
                self._kill(name, ", its GPU does not answer" if blocked else "")
                unresponsive = Unresponsive()
            asleep = time.monotonic()
            await asyncio.sleep(_INTERVAL)
            unresponsive.excuse(time.monotonic() - asleep - _INTERVAL)

    def _is_saving(self, pid: int) -> bool:
        """Return whether a process may still complete the copy of its state."""
        return pid in self._saving and time.monotonic() - self._saving[pid] < SAVING

    def _kill(self, name: str, why: str) -> None:
        if name not in self._killed:
            self._killed.add(name)
            self._note(f"rank {self._workers[name].seat.rank} cannot leave the group{why}: SIGKILL")
        self._workers.send_signal(name, signal.SIGKILL)

    def rescued(self, worker: Worker, answer: worker_messages.Rescued) -> None:
        """Kill a worker that cannot leave the group, now that its state is saved, unless it has left it meanwhile."""
        self._saving.pop(worker.pid, None)
        if not self._is_missing(worker):
            return
        if answer.step is None:
            if worker.generations.formed >= 0:  # otherwise it has no state to lose
                who = f"rank {worker.seat.rank} cannot leave the group"
                self._note(f"{who}, no other rank has its state, and it cannot save it: {answer.why}")
            return
        name = next(name for name, one in self._workers.living if one is worker)
        self._kill(name, f"; step {answer.step} is saved in memory")

    def _is_missing(self, worker: Worker) -> bool:
        if self._generation is None or self._stopper.stopping or worker.seat.rank in self._workers.debugged:
            return False
        joined = worker.generations.entered >= self._generation
        return worker.connected and not worker.spare and not worker.finished and not joined
