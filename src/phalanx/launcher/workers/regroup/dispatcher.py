"""Handles the messages of workers that can regroup."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.contract.messages import worker_messages
from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.workers.context import RegroupObserver
from phalanx.launcher.workers.regroup.heartbeats import HeartbeatWatch
from phalanx.launcher.workers.regroup.regrouper import Regrouper
from phalanx.launcher.workers.spawner import Spawner
from phalanx.launcher.workers.worker import Worker, WorkerState
from phalanx.launcher.workers.workers import Workers


class MessageDispatcher:
    """Records reports of workers, and passes them to the components that act on them."""

    def __init__(
        self,
        workers: Workers,
        regrouper: Regrouper,
        spawner: Spawner,
        *,
        heartbeats: HeartbeatWatch,
        output: OutputCapture,
        observer: RegroupObserver,
        measured: Callable[[worker_messages.MeasuredStep], None],
    ) -> None:
        self._workers = workers
        self._regrouper = regrouper
        self._spawner = spawner
        self._heartbeats = heartbeats
        self._output = output
        self._observer = observer
        self._measured = measured

    def received(self, pid: int, message: worker_messages.FromWorker) -> None:
        """Handle a message of a worker."""
        worker = self._workers.with_pid(pid)
        if worker is None:
            return
        worker.last_heartbeat = time.monotonic()
        match message:
            case worker_messages.Hello():
                self._connected(worker, message)
            case worker_messages.Heartbeat():
                worker.committed(message.step)
                worker.generations.blocked = message.blocked
                worker.progress.samples, worker.progress.sampled = message.samples, worker.last_heartbeat
            case worker_messages.MeasuredStep() if worker.seat.rank == 0 and not worker.spare:
                self._measured(message)
            case worker_messages.SkippedBatch() if worker.seat.rank == 0 and not worker.spare:
                worker.committed(message.step)
                self._observer.batch_skipped(message)
            case worker_messages.Entering():
                worker.generations.entered, worker.generations.holds = message.generation, message.holds
                worker.generations.blocked = False  # it has left that one
            case worker_messages.FirstStep():
                worker.committed(message.step)
                worker.generations.formed = message.generation
                self._output.regrouped()
                self._observer.first_step(message)
            case worker_messages.Done():
                worker.enter(WorkerState.FINISHED)
                worker.exit.unsaved = not message.saved
                self._regrouper.report_readiness()
            case worker_messages.HaltAck():
                worker.committed(message.step)
                self._observer.halt_message(worker.seat.rank, message)
            case worker_messages.Rescued():
                self._regrouper.unresponsive.rescued(worker, message)
            case worker_messages.Keeping() | worker_messages.HaltedAt():
                self._observer.halt_message(worker.seat.rank, message)
        self._regrouper.keep_spares()

    def _connected(self, worker: Worker, hello: worker_messages.Hello) -> None:
        worker.enter(WorkerState.CONNECTED)
        worker.outlives = hello.outlives
        self._spawner.connected(worker, hello)
        self._output.regroups(worker.seat.rank)
        self._regrouper.connected(worker)
        self._heartbeats.start()
