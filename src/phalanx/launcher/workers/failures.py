"""The failures of the workers of an attempt."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.runs import failure_report, root_cause
from phalanx.launcher.workers.worker import Worker, WorkerFailure
from phalanx.launcher.workers.workers import Workers
from phalanx.recover.decision import RetryChance

_TAIL = 60  # lines of stderr that are searched for the cause of a failure
_DUMP = 400  # the same after a crash: faulthandler writes the stacks of all threads


class Failures:
    """Describes why workers have ended, from their exit codes, error files and output."""

    def __init__(self, workers: Workers, output: OutputCapture) -> None:
        self._workers = workers
        self._output = output

    def process_failure(self, worker: Worker) -> root_cause.ProcessFailure:
        """Return what is known about a worker that has ended."""
        error = ""
        with contextlib.suppress(OSError), open(f"{worker.folder}/error.json", errors="replace") as file:
            error = file.read(1 << 20)
        code = worker.code or 0
        death = root_cause.ProcessFailure(
            rank=worker.seat.rank,
            code=code,
            time=worker.ended,
            stopped=worker.stopped,
            hung=worker.exit.hung,
            device=str(worker.seat.slot.device or ""),
            error=error,
            stderr=self._output.tail(worker.seat.rank, "stderr", _DUMP if code < 0 else _TAIL),
            memory=worker.exit.memory,
            stop_sent=worker.exit.stop_sent,
            blame=worker.exit.blame,
        )
        return death if death.blame else replace(death, blame=failure_report.left_alone(death, self.clean_exits()))

    def clean_exits(self) -> tuple[root_cause.CleanExit, ...]:
        """Return the workers that have exited without an error, and whether in the middle of their training."""
        return tuple(
            root_cause.CleanExit(one.seat.rank, one.ended, one.connected and not one.finished)
            for one in self._workers.values()
            if one.code == 0 and not one.spare and not one.stopped
        )

    def explain(self) -> tuple[list[root_cause.ProcessFailure], str]:
        """Return all failures and the message about the first, without the failures of the others."""
        failed, workers = self._workers.failed, self._workers.values()
        deaths = [self.process_failure(worker) for worker in failed]
        death = root_cause.first_cause(deaths)
        if death is None:
            return deaths, ""
        worker = next(worker for worker in failed if worker.seat.rank == death.rank)
        shown = self._output.shown(death.rank)
        tail = [line for line in self._output.tail(death.rank, "stdout", 5) if line.strip()] if shown == "no" else []
        means = _mismatch(workers) if root_cause.differs(death) else ()
        return deaths, failure_report.block(
            death,
            tail=tail,
            folder=worker.folder,
            means=means,
            brief=shown == "whole" and len(workers) == 1,
        )

    def of_worker(self, worker: Worker) -> WorkerFailure:
        """Return the failure of one worker."""
        death = self.process_failure(worker)
        return self._make(
            failure_report.summary(death),
            [worker],
            root_cause.place(death),
            worker.generations.entered,
            retry_chance="over" if worker.exit.unsaved else _retry_chance(death),
            frames=() if self._output.shown(worker.seat.rank) == "whole" else failure_report.frames(death),
        )

    def of_all(self, reason: str, place: str) -> WorkerFailure:
        """Return the failure of a component that all workers depend on."""
        return self._make(reason, self._workers.values(), place, all_workers=not self._workers.living)

    def _make(
        self,
        reason: str,
        workers: Collection[Worker],
        place: str,
        generation: int = -1,
        *,
        all_workers: bool = False,
        retry_chance: RetryChance = "some",
        frames: tuple[str, ...] = (),
    ) -> WorkerFailure:
        steps = [other.progress.step for other in self._workers.values() if other.progress.step is not None]
        return WorkerFailure(
            rank=min((worker.seat.rank for worker in workers), default=0),
            reason=reason,
            place=place,
            time=time.time(),
            uptime=time.monotonic() - min((worker.started_at for worker in workers), default=time.monotonic()),
            step=max(steps, default=None),
            all_workers=all_workers,
            generation=generation,
            retry_chance=retry_chance,
            frames=frames,
            idle=self._workers.idle,
        )


def _mismatch(workers: Collection[Worker]) -> Sequence[str]:
    from phalanx.launcher.evidence import mismatch  # imports the rules of diagnose, which most runs do not need

    return mismatch.words({one.seat.rank: one.exit.mismatch for one in workers if one.exit.mismatch is not None})


def _retry_chance(death: root_cause.ProcessFailure) -> RetryChance:
    if root_cause.stopped_itself(death):
        return "stopped"
    if root_cause.permanent(death):
        return "none"
    return "little" if root_cause.raised(death) else "some"
