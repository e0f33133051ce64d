"""The workers of a node during one attempt, from the first fork to the last exit, with their store and output."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from phalanx.cluster.placement import Seat
from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.forkserver import linux, wire
from phalanx.launcher.actions import RegroupPlan, StartAttempt
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.plan import Plan
from phalanx.launcher.workers import store_process
from phalanx.launcher.workers.context import WorkerGroupContext
from phalanx.launcher.workers.failures import Failures
from phalanx.launcher.workers.formation import Formation
from phalanx.launcher.workers.regroup.dispatcher import MessageDispatcher
from phalanx.launcher.workers.regroup.heartbeats import HeartbeatWatch
from phalanx.launcher.workers.regroup.regrouper import Regrouper
from phalanx.launcher.workers.regroup.timeouts import TimeoutVictims
from phalanx.launcher.workers.spawner import Spawner
from phalanx.launcher.workers.stopper import Stopper
from phalanx.launcher.workers.store_process import StoreProcess
from phalanx.launcher.workers.worker import Worker, WorkerState
from phalanx.launcher.workers.worker_channels import WorkerChannels
from phalanx.launcher.workers.workers import Workers

_EXIT_TIMEOUT = 10.0  # seconds for a worker to exit after an exception has ended its script


class WorkerGroup:
    """Runs the workers of one attempt: starts, regroups and stops them, and follows their exits.

    Spawner        starts workers
    Regrouper      forms generations: ranks, replacements, spares, hold and halt
    Stopper        stops workers
    StoreProcess   hosts the store
    MessageDispatcher, HeartbeatWatch   follow workers that can regroup
    Failures, TimeoutVictims            say why workers have ended
    """

    def __init__(
        self,
        start: StartAttempt,
        context: WorkerGroupContext,
        fork_server: ForkServerClient,
        preload_hints: PreloadHints | None,
    ) -> None:
        self.number = start.attempt
        self.over = asyncio.Event()
        self.measured: worker_messages.MeasuredStep | None = None  # the latest of rank 0
        self.workers = workers = Workers(fork_server, self.worker_exited)
        self.output = output = OutputCapture(
            asyncio.get_running_loop(), context.console, forwarder=context.log_forwarder, echo=context.echo
        )
        self.failures = Failures(workers, output)
        self._context = context
        self._channels = channels = WorkerChannels(
            lambda pid: workers.with_pid(pid) is not None,
            lambda pid, message: dispatcher.received(pid, message),  # noqa: PLW0108 (it is made below)
            self._channel_closed,
        )
        self._spawner = spawner = Spawner(
            start.attempt,
            context,
            workers,
            output,
            channel=channels.name,
            hints=preload_hints,
            on_probe_message=self._probe_message,
        )
        self.store = StoreProcess(
            start.plan,
            start.listener,
            workers,
            folder=context.folder,
            note=context.note,
            over=self.over,
            peers=context.store_peers,
        )
        self._stopper = stopper = Stopper(workers, channels, context.folder, context.note)
        self._regrouper = regrouper = Regrouper(
            Formation(start.plan, start.generation),
            context,
            workers,
            channels,
            spawner=spawner,
            stopper=stopper,
            output=output,
        )
        self._heartbeats = HeartbeatWatch(workers, start.plan.recovery.worker_timeout, context.note)
        self._timeout_victims = TimeoutVictims(workers, self.failures, context.blame, self._timed_out)
        dispatcher = MessageDispatcher(
            workers,
            regrouper,
            spawner,
            heartbeats=self._heartbeats,
            output=output,
            observer=context.observer,
            measured=self._measured_step,
        )
        context.folder.resized(start.plan.group.world_size)
        context.folder.event(events.AttemptStarted(time=time.time(), attempt=self.number))
        if start.plan.output.stdout_filters or start.plan.output.stderr_filters:
            _duplicate_lines(output, start.plan, context.folder.attempt_folder(self.number))
        store_process.leave_key(start.plan, context.folder)
        self.store.prepare()

    @property
    def living(self) -> list[tuple[str, Worker]]:
        """Return the workers that have not exited, with their names."""
        return self.workers.living

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all nodes."""
        return self._regrouper.formation.plan.group.world_size

    @property
    def generation(self) -> int:
        """Return the current generation."""
        return self._regrouper.formation.generation

    @property
    def held(self) -> str:
        """Return why the workers wait for other nodes. Empty: they do not."""
        return self._regrouper.formation.held

    @property
    def stopping(self) -> bool:
        """Return whether the workers are being stopped."""
        return self._stopper.stopping

    # -- actions

    def start_worker(self, seat: Seat, *, spare: bool = False) -> None:
        """Order a worker for this rank from the fork server."""
        self._spawner.start(self._regrouper.formation, seat, spare=spare)

    def regroup(self, to: RegroupPlan) -> None:
        """Start a generation: replace dead workers, by spares if possible, and send all workers their assignment."""
        self._context.folder.resized(to.plan.group.world_size)
        self.store.move(to.plan, to.listener)
        self._regrouper.regroup(to)

    def hold(self, why: str) -> None:
        """Make the workers leave their group and wait with their state in memory."""
        self._regrouper.hold(why)

    def refuse_regroup(self) -> None:
        """Tell workers that have lost a rank not to wait for an assignment."""
        self._regrouper.refuse()

    def halt(self, step: int | None) -> None:
        """Make the ranks report their committed step (None), or halt at `step`."""
        self._regrouper.halt(step)

    def stop(
        self, number: signal.Signals, reason: str, grace: float, *, already_sent: bool = False, failed: bool = False
    ) -> None:
        """Stop all workers, and kill those that do not stop within `grace` seconds.

        `already_sent`: they have received the signal. `failed`: the reason is a failure, not a request.
        """
        self.store.kill_if_stopped()  # a worker that waits for it would handle no signal
        self._stopper.stop(number, reason, grace, already_sent=already_sent, failed=failed)

    def use_fork_server(self, fork_server: ForkServerClient) -> None:
        """Use another fork server, instead of a lost one."""
        self.workers.fork_server = fork_server
        self.store.use_fork_server()

    def close(self) -> None:
        """Close channels, probes and tasks after the attempt."""
        self.store.close()
        self._stopper.cancel()
        self._channels.close()
        self.workers.close()
        self._timeout_victims.cancel()
        self._heartbeats.cancel()
        self._regrouper.unresponsive.cancel()

    # -- messages of the fork server and of probes

    def worker_started(self, name: str, pid: int) -> None:
        """Record the pid of a worker or of the store."""
        if name == store_process.NAME:
            self.store.started(pid)
        if name not in self.workers:
            return
        worker = self.workers[name]
        worker.pid = pid
        worker.enter(WorkerState.RUNNING)
        self._context.folder.event(
            events.WorkerStarted(
                time=time.time(),
                rank=worker.seat.rank,
                pid=pid,
                device=str(worker.seat.slot.device or ""),
                attempt=self.number,
                spare=worker.spare,
            )
        )

    def start_refused(self, name: str, why: str) -> None:
        """Handle a process that the kernel did not start."""
        who = f"rank {self.workers[name].seat.rank}" if name in self.workers else "the store"
        self._context.console.say(f"{who} could not be started: {why}")
        if name in self.workers or name == store_process.NAME:
            self.worker_exited({"name": name, "pid": 0, "status": 1 << 8, "peak": 0})

    def worker_exited(self, message: wire.Message) -> None:
        """Handle the exit of a worker or of the store. A worker that was killed is reported twice."""
        name, code = message["name"], os.waitstatus_to_exitcode(message["status"])
        if name == store_process.NAME:
            self._store_exited(message["pid"], code)
            return
        worker = self.workers.get(name)
        if worker is None or worker.code is not None:
            return
        if code == -signal.SIGKILL and worker.exit.counts_as is not None:
            code = worker.exit.counts_as
        elif code == -signal.SIGKILL and not worker.stopped and self._context.memory_kill is not None:
            worker.exit.memory = self._context.memory_kill(worker.pid)
        self._channels.drain(worker.pid)
        worker.exited(code)
        if worker.probe is not None:
            worker.probe.set_rank(None)
        self._probe_message(name, {"is": "gone"}, [])
        self._context.folder.event(
            events.WorkerExited(
                time=worker.ended,
                rank=worker.seat.rank,
                pid=message["pid"],
                code=code,
                peak_memory=message["peak"],
                attempt=self.number,
                hung=worker.exit.hung,
            )
        )
        if worker.spare:
            lost = not worker.stopped and not self.stopping
            if lost and not self._regrouper.spare_exited(name, worker, code):
                worker.spare = False  # it is not replaced, and counts as a failure of this node
                self._context.worker_failed(self.failures.of_worker(worker))
                return
        elif code == 0:
            self._regrouper.left(worker)
        elif not worker.stopped:
            failure = self.failures.of_worker(worker)
            self.output.failed(failure.rank, failure.place)
            if self.stopping or not self._timeout_victims.take(worker):
                self._context.worker_failed(failure)
            if not self.stopping:
                return  # the decision follows: regroup, or stop the remaining ranks
        self._check_end()

    def _channel_closed(self, pid: int) -> None:
        """Handle a worker that was killed before the fork server can reap it, so that the others need not wait."""
        for name, worker in self.living:
            if worker.pid == pid and not self.stopping and linux.is_being_killed(pid):
                self.worker_exited({"name": name, "pid": pid, "status": int(signal.SIGKILL), "peak": 0})

    def _store_exited(self, pid: int, code: int) -> None:
        if self.over.is_set() or not self.living:
            return
        if self.store.exited(pid, code) and self._regrouper.forming:  # ranks would wait for the old store
            self._context.worker_failed(
                self.failures.of_all("the store was ended while the group formed", place="store")
            )

    def _timed_out(self, victims: list[Worker]) -> None:
        """Report the failure of workers that timed out, with the cause if it was found."""
        for worker in victims:
            if not self.stopping:
                self._context.worker_failed(self.failures.of_worker(worker))
        if self.stopping:
            self._check_end()

    def _check_end(self) -> None:
        """End the attempt if all ranks have exited. Spares of this node are ended, too."""
        if self._timeout_victims.asking:  # it is called again when the cause is known
            return
        if not self.living:
            self.over.set()
        elif not self._regrouper.formation.plan.group.spare and all(worker.spare for _, worker in self.living):
            for name, worker in self.living:
                worker.enter(WorkerState.STOPPING)
                self.workers.send_signal(name, signal.SIGKILL)

    def fork_server_lost(self) -> bool:
        """Adopt the workers that have outlived the fork server, and mark the others as exited: they ended with it.

        Return whether a rank has ended with it.
        """
        adopts = self.workers.fork_server.is_child
        for name, worker in self.living:
            if adopts and worker.outlives and self.workers.adopted.adopt(name, worker.pid):
                continue
            if not worker.stopped:
                worker.exit.with_fork_server = True
            worker.enter(WorkerState.STOPPING)  # it is not the cause
            worker.exited(-signal.SIGKILL)
            self._probe_message(name, {"is": "gone"}, [])
        self.store.fork_server_lost(adopts=adopts)
        if self.stopping:
            self._stopper.repeat()
        return self.lost_with_fork_server

    @property
    def lost_with_fork_server(self) -> bool:
        """Return whether a rank has died with the fork server, and is not replaced yet."""
        return any(worker.exit.with_fork_server for worker in self.workers.values() if not worker.spare)

    def _probe_message(self, name: str, message: wire.Message, fds: list[int]) -> None:
        """Handle a message of a probe that is not an answer."""
        worker = self.workers.get(name)
        match message.get("is"):
            case "mismatch" if worker is not None:
                worker.exit.mismatch = message
            case "stale" if worker is not None:
                self._spawner.imported_too_early(worker, message)
            case "raised" if worker is not None:
                worker.exit.raised, worker.exit.deadline = message, time.monotonic() + _EXIT_TIMEOUT
            case _ if self._context.probe_message is not None:
                self._context.probe_message(name, message, fds)
            case _:
                for fd in fds:
                    os.close(fd)

    def _measured_step(self, message: worker_messages.MeasuredStep) -> None:
        self.measured = message
        if self._context.measured is not None:
            self._context.measured(message)


def _duplicate_lines(output: OutputCapture, plan: Plan, folder: str) -> None:
    """Copy selected lines of all ranks to one file: torchrun's --duplicate-stdout-filters."""
    options = plan.output
    output.duplicate(
        folder,
        stdout=options.stdout_filters,
        stderr=options.stderr_filters,
        teed={seat.rank: options.duplicated(seat) for seat in plan.seats},
        headers={
            seat.rank: plan.line_prefix(seat, os.uname().nodename) or f"[{plan.group.role}{seat.local_rank}]:"
            for seat in plan.seats
        },
    )
