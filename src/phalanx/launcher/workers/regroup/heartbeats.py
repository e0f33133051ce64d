"""Workers that can regroup and have no heartbeat any more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from phalanx.forkserver import linux
from phalanx.launcher.workers.worker import Worker
from phalanx.launcher.workers.workers import Workers

_INTERVAL = 1.0  # seconds between two checks


class HeartbeatWatch:
    """Kills workers without a heartbeat: they are stopped or hold the interpreter lock, and others wait for them."""

    def __init__(self, workers: Workers, timeout: float, note: Callable[[str], None]) -> None:
        self._workers = workers
        self._timeout = timeout
        self._note = note
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start watching, unless it has started."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    def cancel(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL)
            self.check()

    def check(self) -> None:
        """Kill the workers whose last heartbeat is too old, except those in a debugger."""
        for name, worker in self._workers.living:
            now = time.monotonic()
            if worker.seat.rank in self._workers.debugged:
                worker.last_heartbeat = worker.last_heartbeat and now
            silent = now - worker.last_heartbeat
            if worker.last_heartbeat and not worker.finished and silent > self._timeout:
                worker.last_heartbeat = 0.0
                how = f"{linux.state(worker.pid)}{_last_seen(worker)}"
                self._note(f"rank {worker.seat.rank} is silent for {silent:.0f} s ({how}): SIGKILL")
                self._workers.send_signal(name, signal.SIGKILL)


def _last_seen(worker: Worker) -> str:
    """Return where its main thread was, if known."""
    place = worker.probe.status.text.get("place") if worker.probe is not None else None
    return f", last seen at {os.path.basename(place[0])}:{place[1]} in {place[2]}" if place else ""
