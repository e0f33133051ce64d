"""The failures of the workers of an attempt."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection

from phalanx.launcher.hangs import mismatch
from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.runs import root_cause
from phalanx.launcher.workers.worker import Worker, WorkerFailure
from phalanx.launcher.workers.workers import Workers

_TAIL = 60  # lines of stderr that are searched for the cause of a failure
_DUMP = 400  # the same after a crash: faulthandler writes the stacks of all threads


class Failures:
    """Describes why workers have ended, from their exit codes, error files and output."""

    def __init__(self, workers: Workers, output: OutputCapture) -> None:
        self._workers = workers
        self._output = output

    def process_failure(self, worker: Worker, kills: str = "") -> root_cause.ProcessFailure:
        """Return what is known of a worker that has ended. `kills`: what the kernel reports about memory."""
        error = ""
        with contextlib.suppress(OSError), open(f"{worker.folder}/error.json", errors="replace") as file:
            error = file.read(1 << 20)
        code = worker.code or 0
        return root_cause.ProcessFailure(
            rank=worker.seat.rank,
            code=code,
            time=worker.ended,
            stopped=worker.stopped,
            hung=worker.exit.hung,
            device=str(worker.seat.slot.device or ""),
            error=error,
            stderr=self._output.tail(worker.seat.rank, "stderr", _DUMP if code < 0 else _TAIL),
            memory=kills if code == -signal.SIGKILL else "",
            stop_sent=worker.exit.stop_sent,
            blame=worker.exit.blame,
        )

    def explain(self, kills: str) -> tuple[list[root_cause.ProcessFailure], str]:
        """Return all failures and the message about the first. `kills`: what the kernel reports about memory."""
        failed, workers = self._workers.failed, self._workers.values()
        deaths = [self.process_failure(worker, kills) for worker in failed]
        death = root_cause.first_cause(deaths)
        if death is None:
            return deaths, ""
        worker = next(worker for worker in failed if worker.seat.rank == death.rank)
        tail = [line for line in self._output.tail(death.rank, "stdout", 5) if line.strip()]
        here = {one.seat.rank for one in workers}
        well = {one.seat.rank for one in workers if one.code == 0 and one.ended <= death.time}
        left = sorted(well | (here & root_cause.lost(death)))
        mismatches = {one.seat.rank: one.exit.mismatch for one in workers if one.exit.mismatch is not None}
        means = mismatch.words(mismatches) if root_cause.differs(death) else ()
        return deaths, root_cause.block(death, tail=tail, folder=worker.folder, left=left, means=means)

    def of_worker(self, worker: Worker) -> WorkerFailure:
        """Return the failure of one worker."""
        death = self.process_failure(worker)
        return self._make(root_cause.summary(death), [worker], root_cause.place(death), worker.membership.entered)

    def of_all(self, reason: str, place: str) -> WorkerFailure:
        """Return the failure of something that all workers depend on."""
        return self._make(reason, self._workers.values(), place, all_workers=not self._workers.living)

    def _make(
        self, reason: str, workers: Collection[Worker], place: str, generation: int = -1, *, all_workers: bool = False
    ) -> WorkerFailure:
        steps = [other.progress.step for other in self._workers.values() if other.progress.step is not None]
        return WorkerFailure(
            rank=min((worker.seat.rank for worker in workers), default=0),
            reason=reason,
            place=place,
            time=time.time(),
            lived=time.monotonic() - min((worker.born for worker in workers), default=time.monotonic()),
            step=max(steps, default=None),
            all_workers=all_workers,
            generation=generation,
        )
