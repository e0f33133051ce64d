"""The workers of an attempt, by name."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping

from phalanx.forkserver import wire
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.workers.adopted import AdoptedProcesses
from phalanx.launcher.workers.worker import Worker


class Workers(Mapping[str, Worker]):
    """The workers of an attempt, and the fork server through which they get signals.

    A worker that has exited stays until another one replaces it. Names are used once, because ranks may change.
    `exited` is called when one that has outlived its fork server exits.
    """

    def __init__(self, fork_server: ForkServerClient, exited: Callable[[wire.Message], None] = lambda _: None) -> None:
        self.fork_server = fork_server  # another one, after the first was lost
        self.adopted = AdoptedProcesses(exited)
        self.debugged: frozenset[int] = frozenset()  # ranks in a debugger, on any node
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        """Return the worker with this name."""
        return self._workers[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, the oldest worker first."""
        return iter(self._workers)

    def __len__(self) -> int:
        """Return the number of workers, including those that have exited."""
        return len(self._workers)

    @property
    def living(self) -> list[tuple[str, Worker]]:
        """Return the workers that have not exited, with their names."""
        return [(name, worker) for name, worker in self._workers.items() if worker.code is None]

    @property
    def ending(self) -> bool:
        """Return whether a rank is about to exit after an exception about others: the remaining ranks make no
        progress.
        """
        return any(worker.exit.expected for worker in self._workers.values())

    @property
    def failed(self) -> list[Worker]:
        """Return the workers that exited with an error."""
        return [worker for worker in self._workers.values() if worker.code and not worker.spare]

    @property
    def ranks(self) -> dict[int, int]:
        """Return pid -> rank of all workers, also of those that exited."""
        return {worker.pid: worker.seat.rank for worker in self._workers.values()}

    @property
    def idle(self) -> float:
        """Return the seconds since a worker last reported a newer step. 0: none ever did."""
        stepped = max((worker.progress.stepped for worker in self.values()), default=0.0)
        return time.monotonic() - stepped if stepped else 0.0

    def with_pid(self, pid: int) -> Worker | None:
        """Return the live worker with this pid."""
        return next((worker for _, worker in self.living if worker.pid == pid), None)

    def formed(self, generation: int) -> bool:
        """Return whether all ranks have committed a step of this generation."""
        return all(worker.generations.formed == generation for worker in self._workers.values() if not worker.spare)

    def add(self, name: str, worker: Worker) -> None:
        """Add a worker that is being started."""
        self._workers[name] = worker

    def forget(self, name: str) -> None:
        """Remove a worker that was replaced or never started."""
        probe = self._workers.pop(name).probe
        if probe is not None:
            probe.close()

    def send_signal(self, name: str, number: int, *, alone: bool = False) -> None:
        """Send a signal to a worker and all its processes, or to it alone."""
        if self.adopted.send_signal(name, number, alone=alone):
            return
        with contextlib.suppress(OSError):
            self.fork_server.send({"do": "signal", "name": name, "signal": int(number), "alone": alone})

    def kill(self) -> None:
        """Kill all workers."""
        for name, _ in self.living:
            self.send_signal(name, signal.SIGKILL)

    def end_as(self, name: str, code: int) -> None:
        """Kill a worker whose script is over and whose process hangs. It counts as ended with `code`."""
        self._workers[name].exit.counts_as = code
        self.send_signal(name, signal.SIGKILL, alone=True)

    def close(self) -> None:
        """Close the channels to all probes, after the attempt."""
        self.adopted.close()
        for worker in self._workers.values():
            if worker.probe is not None:
                worker.probe.close()
