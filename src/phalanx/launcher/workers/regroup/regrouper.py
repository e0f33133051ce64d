"""Forming the generations of the group on this node."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from dataclasses import replace

from phalanx.cluster.placement import Seat
from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.launcher.actions import RegroupPlan
from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.workers.context import RegroupObserver, WorkerGroupContext
from phalanx.launcher.workers.formation import Formation
from phalanx.launcher.workers.regroup import orphan_cleanup
from phalanx.launcher.workers.regroup.readiness import Readiness
from phalanx.launcher.workers.regroup.spares import SparePool
from phalanx.launcher.workers.regroup.unresponsive import UnresponsiveWatch
from phalanx.launcher.workers.spawner import Spawner
from phalanx.launcher.workers.stopper import Stopper
from phalanx.launcher.workers.worker import Worker
from phalanx.launcher.workers.worker_channels import WorkerChannels
from phalanx.launcher.workers.workers import Workers

_RECOVERY = 10.0  # seconds: a recovery that takes longer does not delay the start of spares


class ReadinessReporter:
    """Reports to the coordinator whether the workers of this node can regroup, each time that this changes."""

    def __init__(self, observer: RegroupObserver) -> None:
        self._observer = observer
        self.current = Readiness()

    def update(self, workers: Collection[Worker], *, spare_node: bool) -> None:
        """Report the readiness of these workers if it has changed. Spares count only on a node of spares."""
        counted = [worker for worker in workers if not worker.spare or spare_node]
        now = Readiness(
            connected=self.current.connected or any(worker.connected for worker in counted),
            finished=any(worker.finished or worker.code == 0 for worker in counted if not worker.spare),
            all_connected=all(worker.connected for worker in counted),
        )
        if now != self.current:
            self.current = now
            self._observer.regroup_ready(*now)


class Regrouper:
    """Assigns ranks to the workers of this node, replaces dead ones, and makes all of them wait or halt."""

    def __init__(
        self,
        formation: Formation,
        context: WorkerGroupContext,
        workers: Workers,
        channels: WorkerChannels,
        *,
        spawner: Spawner,
        stopper: Stopper,
        output: OutputCapture,
    ) -> None:
        self.formation = formation
        self._folder = context.folder
        self._observer = context.observer
        self._workers = workers
        self._channels = channels
        self._spawner = spawner
        self._stopper = stopper
        self._output = output
        self._spares = SparePool(workers, spawner, context.note)
        self._readiness = ReadinessReporter(context.observer)
        self.unresponsive = UnresponsiveWatch(workers, channels, stopper, context.note)
        self._halt: worker_messages.Halt | None = None  # the latest halt message
        self._regrouped = -math.inf  # when the latest generation but the first began

    @property
    def forming(self) -> bool:
        """Return whether workers that can regroup have not formed this generation yet."""
        return self._readiness.current.can_regroup and not self._workers.formed(self.formation.generation)

    def regroup(self, to: RegroupPlan) -> None:
        """Start a generation: replace dead workers, by spares if possible, and send all workers their assignment."""
        self.formation = Formation(to.plan, to.generation, to.why, halt=to.halt)
        names = {worker.seat.local_rank: name for name, worker in self._workers.living}
        ranks: dict[int, int] = {}
        for seat in to.plan.seats:
            name = names.get(seat.local_rank)
            if name is not None:
                ranks |= self._assign(self._workers[name], seat, spare=to.plan.group.spare)
        self._output.renumber(ranks)
        for seat in to.plan.seats:
            self._fill(seat, names.get(seat.local_rank))
        self._regrouped = time.monotonic()
        self.report_readiness()
        self.unresponsive.start(to.generation)

    def _fill(self, seat: Seat, name: str | None) -> None:
        """Send the worker of a rank its assignment. Without a worker (None): take a spare, or start one."""
        if name is None:
            name = self._spares.take(seat.slot)
            dead = [name for name, worker in self._workers.items() if worker.code is not None]
            for gone in dead:
                if self._workers[gone].seat.local_rank == seat.local_rank:
                    self._end_leftovers(self._workers[gone])
                    self._workers.forget(gone)
            if name is None:
                self._spawner.start(self.formation, seat, spare=self.formation.plan.group.spare)
                return
            self._output.renumber(self._assign(self._workers[name], seat, spare=False))
        self._send_assignment(self._workers[name])

    def _end_leftovers(self, dead: Worker) -> None:
        """End the leftover processes of a dead worker, before another worker needs their resources."""
        living = [worker.pid for _, worker in self._workers.living]
        reapers = (os.getpid(), self._workers.fork_server.pid)
        orphan_cleanup.kill(dead.pid, dead.seat.local_rank, run=self._folder.name, living=living, reapers=reapers)

    def _assign(self, worker: Worker, seat: Seat, *, spare: bool) -> dict[int, int]:
        """Give a worker a rank. Returns {old rank: new rank}."""
        own = worker.seat.slot
        # A process cannot change its device.
        was, worker.seat = worker.seat.rank, seat if own.device is None else replace(seat, slot=own)
        if was != seat.rank or worker.spare != spare:
            worker.spare = spare
            if worker.probe is not None:
                worker.probe.set_rank(None if spare else seat.rank)
            self._folder.event(events.RankChanged(time=time.time(), rank=seat.rank, pid=worker.pid, previous_rank=was))
        return {was: seat.rank}

    def _send_assignment(self, worker: Worker) -> None:
        if worker.connected:
            self._channels.send(worker.pid, self.formation.assignment(worker))

    def hold(self, why: str) -> None:
        """Make the workers leave their group and wait with their state in memory."""
        self.formation = replace(self.formation, held=why)
        self.unresponsive.cancel()
        for _, worker in self._workers.living:
            self._send_assignment(worker)

    def left(self, gone: Worker) -> None:
        """Handle a worker that has exited without an error. If its training had not ended, no group can form again."""
        self.report_readiness()
        if gone.connected and not gone.finished and not gone.stopped:
            self._observer.rank_left()

    def refuse(self) -> None:
        """Tell workers that have lost a rank not to wait for an assignment."""
        for _, worker in self._workers.living:
            if worker.connected and not worker.spare:
                self._channels.send(worker.pid, worker_messages.NoRegroup())

    def halt(self, step: int | None) -> None:
        """Make the ranks report their committed step (None), or halt at `step`."""
        self._halt = worker_messages.Halt(step)
        for _, worker in self._workers.living:
            if not worker.spare:
                self._channels.send(worker.pid, self._halt)

    def connected(self, worker: Worker) -> None:
        """Send a worker that has connected its assignment."""
        self._channels.send(worker.pid, self.formation.assignment(worker))
        if self._halt is not None and not worker.spare:
            self._channels.send(worker.pid, self._halt)
        self.report_readiness()

    def spare_exited(self, name: str, worker: Worker, code: int) -> bool:
        """Replace a spare that has ended. Return False if that is useless and the node cannot take part."""
        return self._spares.exited(self.formation, name, worker, code)

    def keep_spares(self) -> None:
        """Start missing spares, but not while the ranks recover: opening a CUDA context delays all GPU calls."""
        recovers = self.forming and time.monotonic() - self._regrouped < _RECOVERY
        if self._readiness.current.connected and not recovers and not self._stopper.stopping:
            self._spares.keep(self.formation)

    def report_readiness(self) -> None:
        """Report whether the workers can regroup, if that has changed."""
        self._readiness.update(self._workers.values(), spare_node=self.formation.plan.group.spare)
