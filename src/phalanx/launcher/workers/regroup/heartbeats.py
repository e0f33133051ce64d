"""Watches for workers that can regroup and no longer send heartbeats."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from phalanx.forkserver import linux
from phalanx.launcher.workers.worker import Worker
from phalanx.launcher.workers.workers import Workers

_INTERVAL = 1.0  # seconds between two checks


class HeartbeatWatch:
    """Kills workers without a heartbeat: they are stopped or hold the interpreter lock, and others wait for them.

    A worker that has not connected yet has no heartbeat: it imports, which may take any time. It is killed if it is
    stopped. Seconds are counted by checks and not by a clock, so that a pause of the whole job does not count.
    """

    def __init__(self, workers: Workers, timeout: float, note: Callable[[str], None]) -> None:
        self._workers = workers
        self._timeout = timeout
        self._note = note
        self._silent: dict[int, tuple[float, float]] = {}  # pid -> its last heartbeat, and the seconds since then
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
        """Kill the workers that are silent for too long, except those in a debugger. Called once per second."""
        before, self._silent = self._silent, {}
        for name, worker in self._workers.living:
            last, seconds = before.get(worker.pid, (worker.last_heartbeat, 0.0))
            silent = last == worker.last_heartbeat and self._is_due(worker)
            self._silent[worker.pid] = worker.last_heartbeat, seconds + _INTERVAL if silent else 0.0
            if silent and seconds < self._timeout <= seconds + _INTERVAL:
                how = f"{linux.state(worker.pid)}{_last_seen(worker)}"
                self._note(f"rank {worker.seat.rank} is silent for {seconds + _INTERVAL:.0f} s ({how}): SIGKILL")
                self._workers.send_signal(name, signal.SIGKILL)

    def _is_due(self, worker: Worker) -> bool:
        """Return whether a live worker should have a heartbeat."""
        if not worker.pid or worker.finished or worker.seat.rank in self._workers.debugged:
            return False
        return bool(worker.last_heartbeat) or linux.state(worker.pid) == "stopped"


def _last_seen(worker: Worker) -> str:
    """Return where its main thread was, if known."""
    place = worker.probe.status.text.get("place") if worker.probe is not None else None
    return f", last seen at {os.path.basename(place[0])}:{place[1]} in {place[2]}" if place else ""
