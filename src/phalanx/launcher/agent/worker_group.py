"""The workers of a node during one attempt, from the first fork to the last exit, with their store and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Seat
from phalanx.contract import events, worker_messages
from phalanx.forkserver import linux, wire
from phalanx.launcher.agent import spares
from phalanx.launcher.agent.probes import ProbeClient, StatusBoard
from phalanx.launcher.agent.timeouts import Blame, TimeoutVictims
from phalanx.launcher.agent.unresponsive import LAST, ON_GPU, PATIENCE, SAVING, Unresponsive
from phalanx.launcher.agent.worker import Worker, WorkerFailure, WorkerState, cuda_device
from phalanx.launcher.agent.worker_channels import WorkerChannels
from phalanx.launcher.coordination.actions import RegroupPlan
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.hangs import mismatch
from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.output.console import Console
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder

_MOST_STORES = 3  # replacements per attempt: a store that cannot start would be replaced for ever
_MOST_SPARES = 3  # the same for spares
_TAIL = 60  # lines of stderr that are searched for the cause of a failure
_DUMP = 400  # the same after a crash: faulthandler writes the stacks of all threads
_LOOK = 0.1  # seconds between two checks of who has joined
_ENDS = 10.0  # seconds for a worker to exit after an exception has ended its script
_SLACK = 5.0  # seconds for the loss of a node to reach all nodes


@dataclass(frozen=True)
class WorkerGroupContext:
    """What all attempts of a run share."""

    plan: Plan
    folder: RunFolder
    console: Console
    listener: socket.socket | None  # of the store, bound once: each attempt has a new store at the same address
    note: Callable[[str], None]
    # Called when a worker has failed. The decision comes later, in another call.
    worker_failed: Callable[[WorkerFailure], None]
    # Called when the readiness changes: a worker has connected; one has finished; all have connected.
    regroup_ready: Callable[[bool, bool, bool], None]
    # Called when a generation has committed its first step.
    first_step: Callable[[worker_messages.FirstStep], None]
    # Called with what a rank reports about a halt.
    halt_message: Callable[[int, worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt], None]
    log_forwarder: LogForwarder | None = None  # sends output to the leader
    echo: bool = True  # print output on this node
    memory: str = ""  # address of the snapshot memory; empty: none
    board: StatusBoard | None = None
    probe_message: Callable[[str, wire.Message, list[int]], None] | None = None  # for messages that are no answer
    measured: Callable[[worker_messages.MeasuredStep], None] | None = None  # for metrics of rank 0
    blame: Blame | None = None  # explains the timeout of a rank


class WorkerGroup:
    """Starts the workers of one attempt, follows their messages and exits, regroups and stops them."""

    def __init__(
        self,
        number: int,
        context: WorkerGroupContext,
        fork_server: ForkServerClient,
        preload_hints: PreloadHints | None,
        generation: int = 0,
    ) -> None:
        self.number = number
        self.workers: dict[str, Worker] = {}  # by a name that is used once: ranks may change
        self.output = OutputCapture(
            asyncio.get_running_loop(), context.console, forwarder=context.log_forwarder, echo=context.echo
        )
        self.over = asyncio.Event()
        self.debugged: frozenset[int] = frozenset()  # ranks in a debugger, on any node
        self.generation = generation
        self.measured: worker_messages.MeasuredStep | None = None  # the latest of rank 0
        self._why = ""  # why this generation was formed
        self._held = ""  # why the workers wait: too few nodes are left
        self._names = map(str, count())
        self._spares_lost = 0
        self._hellos: dict[int, worker_messages.Hello] = {}  # by local rank, of its latest worker
        self._halts = False  # this generation writes a checkpoint and ends
        self._halt: worker_messages.Halt | None = None  # the latest halt message
        self._channels = WorkerChannels(self)
        self._heartbeat_watch: asyncio.Task[None] | None = None
        self._missing: asyncio.Task[None] | None = None  # watches survivors that do not join the new group
        self._saving: set[int] = set()  # processes that copy their state to memory
        self._readiness = (False, False, False)  # as last reported
        self._context = context
        self._fork_server = fork_server
        self._preload_hints = preload_hints
        self._variables_set: list[dict[str, str | None]] = []  # variables that ranks set before they imported torch
        self._store_started = False
        self._store_stops = False  # it was stopped on purpose
        self._stores_lost = 0
        self._escalation: asyncio.Task[None] | None = None
        self._timeout_victims = TimeoutVictims(self, context.blame, self._timed_out)
        context.folder.event(events.AttemptStarted(time=time.time(), attempt=number))
        self._open_duplicates()

    @property
    def living(self) -> list[tuple[str, Worker]]:
        """Return the workers that have not exited, with their names."""
        return [(name, worker) for name, worker in self.workers.items() if worker.code is None]

    @property
    def ranks(self) -> dict[int, int]:
        """Return pid -> rank of all workers, also of those that exited."""
        return {worker.pid: worker.seat.rank for worker in self.workers.values()}

    @property
    def full(self) -> bool:
        """Return whether every rank of this node has a living worker."""
        return sum(not worker.spare for _, worker in self.living) == len(self._context.plan.seats)

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all nodes."""
        return self._context.plan.placement.world_size

    @property
    def silence(self) -> float:
        """Return after how many seconds without a heartbeat a worker is lost."""
        return self._context.plan.recovery.worker_timeout

    @property
    def formed(self) -> bool:
        """Return whether all ranks of this node have committed a step of this generation."""
        return all(worker.formed == self.generation for worker in self.workers.values() if not worker.spare)

    @property
    def stopping(self) -> bool:
        """Return whether the workers are being stopped."""
        return self._escalation is not None

    @property
    def ending(self) -> bool:
        """Return whether a rank is about to exit after an exception about others: the rest makes no progress."""
        return any(worker.ending > time.monotonic() for worker in self.workers.values())

    @property
    def held(self) -> str:
        """Return why the workers wait for other nodes. Empty: they do not."""
        return self._held

    @property
    def failed(self) -> list[Worker]:
        """Return the workers that exited with an error."""
        return [worker for worker in self.workers.values() if worker.code and not worker.spare]

    def _report_readiness(self) -> None:
        """Report the readiness if it has changed. A plain script never connects."""
        workers = [worker for worker in self.workers.values() if not worker.spare or self._context.plan.spare]
        ended = any(worker.finished or worker.code == 0 for worker in workers if not worker.spare)
        called = self._readiness[0] or any(worker.connected for worker in workers)
        readiness = (called, ended, all(worker.connected for worker in workers))
        if readiness != self._readiness:
            self._readiness = readiness
            self._context.regroup_ready(*readiness)

    def _open_duplicates(self) -> None:
        """Copy selected lines of all ranks to one file: torchrun's --duplicate-stdout-filters."""
        plan = self._context.plan
        output = plan.output
        if not output.stdout_filters and not output.stderr_filters:
            return
        folder = self._context.folder.attempt_folder(self.number)
        os.makedirs(folder, exist_ok=True)
        self.output.duplicate(
            folder,
            stdout=output.stdout_filters,
            stderr=output.stderr_filters,
            teed={seat.rank: output.duplicated(seat) for seat in plan.seats},
            headers={
                seat.rank: plan.line_prefix(seat, os.uname().nodename) or f"[{plan.role}{seat.local_rank}]:"
                for seat in plan.seats
            },
        )

    # -- starting

    def prepare_store(self) -> None:
        """Start the store, or let the first connection start it.

        Where torch is imported already, a store costs a fork. Elsewhere it costs an import, and many scripts never
        use it.
        """
        listener = self._context.listener
        if listener is None:  # another node hosts it
            return
        if self._fork_server.forks:
            self._start_store()
        else:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._start_store)

    def _start_store(self) -> None:
        listener = self._context.listener
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener.fileno())
        if self._store_started or self.over.is_set():
            return
        self._store_started, self._store_stops = True, False
        plan, path = self._context.plan, self._context.folder.path
        order = fork_servers.store_order(self._fork_server, plan, plan.master_port)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = os.open(f"{path}/store.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            self._fork_server.send(order, [nowhere, log, log, listener.fileno()])
        os.close(nowhere)
        os.close(log)

    def start_worker(self, seat: Seat, *, spare: bool = False) -> None:
        """Order a worker for this rank from the fork server."""
        plan, run_folder = self._context.plan, self._context.folder
        name = next(self._names)
        label = f"spare.{name}" if spare else str(seat.rank)
        folder = run_folder.rank_folder(self.number, label)
        if any(worker.folder == folder for _, worker in self.living):  # in use by a worker that had this rank before
            folder = run_folder.rank_folder(self.number, f"{label}.{self.generation}")
        with contextlib.suppress(OSError):  # of an earlier worker
            os.unlink(f"{folder}/error.json")
        environ = plan.environment(
            seat,
            attempt=self.number,
            run=run_folder.name,
            folder=run_folder.path,
            rank_folder=folder,
            port=plan.master_port,
            line=self._channels.name,
            memory=self._context.memory,
        )
        order = fork_servers.worker_order(self._fork_server, name, plan.command, seat, environ)
        if self._preload_hints is not None:
            order["assumed"] = list(self._preload_hints.variables)
            if seat.rank == 0 and self._fork_server.way == "cold":
                order["hints"] = self._preload_hints.path
        if (device := cuda_device(self._hellos.get(seat.local_rank), environ)) is not None:
            order["cuda"] = device
        output = plan.output
        out, err = self.output.open(
            seat.rank, folder, show=output.shown(seat), terminal=seat.rank == 0, apart=output.separate(seat)
        )
        stdin = self._stdin(seat.rank)
        probe = self._probe(name)
        if probe is not None:
            order["probe"] = probe.slot
            probe.set_rank(None if spare else seat.rank)
        self.workers[name] = Worker(seat, folder, born=time.monotonic(), spare=spare, probe=probe)
        try:
            self._fork_server.send(order, [stdin, out, err, *(probe.fds if probe is not None else ())])
        except OSError:
            self._forget(name)  # the fork server is gone: its reader reports it
        else:
            if probe is not None:
                probe.handed_over()
        os.close(stdin)
        self.output.handed_over(seat.rank)

    def _forget(self, name: str) -> None:
        probe = self.workers.pop(name).probe
        if probe is not None:
            probe.close()

    def _probe(self, name: str) -> ProbeClient | None:
        board = self._context.board
        slot = board.allocate() if board is not None else None
        if board is None or slot is None:
            return None
        return ProbeClient(board, slot, lambda message, fds: self._probe_message(name, message, fds))

    def _probe_message(self, name: str, message: wire.Message, fds: list[int]) -> None:
        """Handle a message of a probe that is no answer."""
        if message.get("is") == "mismatch" and name in self.workers:
            self.workers[name].mismatch = message
        elif message.get("is") == "stale" and name in self.workers:
            self._imported_too_early(self.workers[name], message)
        elif message.get("is") == "raised" and name in self.workers:
            self.workers[name].raised, self.workers[name].ending = message, time.monotonic() + _ENDS
        elif self._context.probe_message is not None:
            self._context.probe_message(name, message, fds)
        else:
            for fd in fds:
                os.close(fd)

    def _imported_too_early(self, worker: Worker, message: wire.Message) -> None:
        """Handle a script that set variables which the fork server's imports had read: the next run knows them."""
        if not message["late"]:
            self.output.repeats(worker.seat.rank)
        if self._preload_hints is None:
            return
        if not self._variables_set:
            does = "ignored there" if message["late"] else "starting it again as a fresh interpreter"
            names = ", ".join(message["variables"])
            self._context.note(f"rank {worker.seat.rank} set {names} before an import that reads it: {does}")
        self._variables_set.append(message["variables"])
        self._preload_hints.learned(self._variables_set).save()
        if message["late"]:
            self._preload_hints.refuse()

    def _stdin(self, rank: int) -> int:
        """Return the agent's stdin for one rank, if the terminal is its own to read; /dev/null for the others.

        A script from stdin (`phalanx run -`) is for all ranks, and each reads it from the start.
        """
        if self._context.plan.command.kind == "stdin":
            return os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
        if rank == self._context.plan.stdin_rank and not self._context.console.hidden:
            with contextlib.suppress(OSError):
                if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                    return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def worker_started(self, name: str, pid: int) -> None:
        """Record the pid of a worker."""
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

    # -- exits

    def worker_exited(self, message: wire.Message) -> None:
        """Handle the exit of a worker or of the store."""
        code = os.waitstatus_to_exitcode(message["status"])
        if message["name"] == "store":
            self._store_exited(code)
            return
        worker = self.workers[message["name"]]
        if code == -signal.SIGKILL and worker.ends_as is not None:
            code = worker.ends_as
        self._channels.drain(worker.pid)
        self._set_exited(worker, code)
        if worker.probe is not None:
            worker.probe.set_rank(None)
        self._probe_message(message["name"], {"is": "gone"}, [])
        self._context.folder.event(
            events.WorkerExited(
                time=worker.ended,
                rank=worker.seat.rank,
                pid=message["pid"],
                code=code,
                peak_memory=message["peak"],
                attempt=self.number,
                hung=worker.hung,
            )
        )
        if worker.spare:
            self._spare_exited(message["name"], worker, code)
        elif code == 0:
            self._report_readiness()
        elif not worker.stopped:
            if self.stopping or not self._timeout_victims.take(worker):
                self._report_failure(worker)
            if not self.stopping:
                return  # the decision follows: regroup, or stop the rest
        self._check_end()

    def _set_exited(self, worker: Worker, code: int) -> None:
        worker.enter(WorkerState.EXITED)
        worker.code, worker.ended = code, time.time()

    def _report_failure(self, worker: Worker) -> None:
        death = self.process_failure(worker)
        self._context.worker_failed(
            self._make_failure(root_cause.summary(death), [worker], root_cause.place(death), worker.entered)
        )

    def _timed_out(self, victims: list[Worker]) -> None:
        """Report the failure of workers that timed out, now that the cause is known if it can be."""
        for worker in victims:
            if not self.stopping:
                self._report_failure(worker)
        if self.stopping:
            self._check_end()

    def _check_end(self) -> None:
        """End the attempt if all ranks have exited. Spares of this node are ended with it."""
        if self._timeout_victims.asking:  # it is called again when the cause is known
            return
        if not self.living:
            self.over.set()
        elif not self._context.plan.spare and all(worker.spare for _, worker in self.living):
            for name, worker in self.living:
                worker.enter(WorkerState.STOPPING)
                self.send_signal(name, signal.SIGKILL)

    def _spare_exited(self, name: str, worker: Worker, code: int) -> None:
        if worker.stopped or self.stopping:
            return
        self._spares_lost += 1
        self._forget(name)
        text = f"a spare worker ended ({root_cause.in_words(code)}); see {worker.folder}"
        if self._spares_lost >= _MOST_SPARES:
            self._context.note(f"{text}. It is the third: no more spares are started")
        else:
            self._context.note(text)
            self.start_worker(worker.seat, spare=True)

    def shared_failure(self, reason: str, place: str) -> WorkerFailure:
        """Return the failure of something that all workers depend on."""
        return self._make_failure(reason, list(self.workers.values()), place, all_workers=not self.living)

    def _make_failure(
        self, reason: str, workers: list[Worker], place: str, generation: int = -1, *, all_workers: bool = False
    ) -> WorkerFailure:
        steps = [other.step for other in self.workers.values() if other.step is not None]
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

    def start_refused(self, name: str, why: str) -> None:
        """Handle a process that the kernel refused to start."""
        who = f"rank {self.workers[name].seat.rank}" if name in self.workers else "the store"
        self._context.console.say(f"{who} could not be started: {why}")
        if name in self.workers:
            self.worker_exited({"name": name, "pid": 0, "status": 1 << 8, "peak": 0})

    def _store_exited(self, code: int) -> None:
        """Replace the store. Without it no group can form, but an existing group continues."""
        if self.over.is_set() or not self.living or self._store_stops:
            return
        self._context.folder.event(events.StoreLost(time=time.time(), code=code))
        self._stores_lost += 1
        if self._stores_lost > _MOST_STORES:
            self._context.note(f"the store process ends again and again; see {self._context.folder.path}/store.log")
            return
        self._context.note(f"the store process ended ({root_cause.in_words(code)}); a new one takes its place, empty")
        self._store_started = False
        self._start_store()
        if self._readiness[:2] == (True, False) and not self.formed:  # ranks would wait for the old store
            self._context.worker_failed(
                self.shared_failure("the store was ended while the group formed", place="store")
            )

    def fork_server_lost(self) -> None:
        """Mark all workers as exited: they die with the fork server."""
        for name, worker in self.living:
            worker.enter(WorkerState.STOPPING)  # it is not the cause
            self._set_exited(worker, -signal.SIGKILL)
            self._probe_message(name, {"is": "gone"}, [])
        self._store_started = False

    def use_fork_server(self, fork_server: ForkServerClient) -> None:
        """Use another fork server, in place of one that was killed with its store and workers."""
        self._fork_server = fork_server
        self.prepare_store()

    def send_signal(self, name: str, number: int, *, alone: bool = False) -> None:
        """Send a signal to a worker and all its processes, or to it alone."""
        with contextlib.suppress(OSError):
            self._fork_server.send({"do": "signal", "name": name, "signal": int(number), "alone": alone})

    def end_as(self, name: str, code: int) -> None:
        """Kill a worker whose script is over and whose process hangs. It counts as ended with `code`."""
        self.workers[name].ends_as = code
        self.send_signal(name, signal.SIGKILL, alone=True)

    def stop(self, number: signal.Signals, reason: str, grace: float, *, already_sent: bool = False) -> None:
        """Stop all workers, and kill those that do not stop within `grace` seconds.

        `already_sent`: they have received the signal.
        """
        self._context.folder.event(events.Stopping(time=time.time(), reason=reason, signal=number.name))
        for name, worker in self.living:
            worker.enter(WorkerState.STOPPING)
            worker.stop_sent = time.time()
            if worker.seat.rank in self.debugged and number == signal.SIGINT:  # a debugger would handle it
                self.send_signal(name, signal.SIGTERM)
            elif not already_sent:
                self.send_signal(name, number)
            self._channels.send(worker.pid, worker_messages.EndWorker(number))
        if self._escalation is None:
            self._escalation = asyncio.get_running_loop().create_task(self._escalate(number, grace))

    async def _escalate(self, number: signal.Signals, grace: float) -> None:
        """Send stronger signals. A worker in native code does not handle SIGINT, and one may ignore SIGTERM."""
        steps = [(signal.SIGKILL, grace)]
        if number != signal.SIGTERM:
            steps = [(signal.SIGTERM, grace / 3), (signal.SIGKILL, grace * 2 / 3)]
        for next_signal, wait in steps:
            await asyncio.sleep(wait)
            for name, worker in self.living:
                self._context.note(f"rank {worker.seat.rank} has not stopped after {wait:.0f} s: {next_signal.name}")
                self.send_signal(name, next_signal)
                self._channels.send(worker.pid, worker_messages.EndWorker(next_signal))

    def kill(self) -> None:
        """Kill all workers."""
        for name, _ in self.living:
            self.send_signal(name, signal.SIGKILL)

    def close(self) -> None:
        """Close channels, probes and tasks after the attempt."""
        if self._context.listener is not None:
            asyncio.get_running_loop().remove_reader(self._context.listener.fileno())
        if self._escalation is not None:
            self._escalation.cancel()
        self._channels.close()
        for worker in self.workers.values():
            if worker.probe is not None:
                worker.probe.close()
        self._timeout_victims.cancel()
        for task in (self._heartbeat_watch, self._missing):
            if task is not None:
                task.cancel()

    # -- regroup

    def regroup(self, to: RegroupPlan) -> None:
        """Start a generation: replace dead workers, by spares if possible, and send all workers their assignment."""
        before, self._context = self._context, replace(self._context, plan=to.plan, listener=to.listener)
        self.generation, self._why, self._held, self._halts = to.generation, to.why, "", to.halt
        if to.listener is not before.listener:
            self._move_store(before.listener)
        at = {worker.seat.local_rank: name for name, worker in self.living}
        ranks: dict[int, int] = {}
        for seat in to.plan.seats:
            name = at.get(seat.local_rank)
            if name is not None:
                ranks |= self._assign(self.workers[name], seat, spare=to.plan.spare)
        self.output.renumber(ranks)
        for seat in to.plan.seats:
            self._fill(seat, at.get(seat.local_rank))
        self._keep_spares()
        self._report_readiness()
        if self._missing is not None:
            self._missing.cancel()
        self._missing = asyncio.get_running_loop().create_task(self._watch_missing())

    async def _watch_missing(self) -> None:
        """Kill workers that cannot leave the old group and so block the new one. Save their state first if needed."""
        unresponsive, asked = Unresponsive(), set[int]()
        while missing := {worker.pid: name for name, worker in self.living if self._is_missing(worker)}:
            safe = any(worker.holds and worker.entered == self.generation for _, worker in self.living)
            patience = ON_GPU if any(worker.seat.slot.device is not None for _, worker in self.living) else PATIENCE
            for pid in unresponsive.among(missing.keys() - asked, patience) if not safe else ():
                asked.add(pid)
                self._saving.add(pid)
                self._channels.send(pid, worker_messages.Rescue())
            for pid in unresponsive.among(missing, patience if safe else LAST):
                if not safe and pid in self._saving and not unresponsive.among([pid], SAVING):
                    continue
                self._context.note(f"rank {self.workers[missing[pid]].seat.rank} cannot leave the group: SIGKILL")
                self.send_signal(missing[pid], signal.SIGKILL)
                unresponsive = Unresponsive()
            await asyncio.sleep(_LOOK)

    def _rescued(self, worker: Worker, answer: worker_messages.Rescued) -> None:
        """Kill a worker that cannot leave the group, now that its state is saved, unless it has left it meanwhile."""
        self._saving.discard(worker.pid)
        if not self._is_missing(worker):
            return
        who = f"rank {worker.seat.rank} cannot leave the group"
        if answer.step is None:
            if worker.formed >= 0:  # else it has no state to lose
                self._context.note(f"{who}, no other rank has its state, and it cannot save it: {answer.why}")
            return
        self._context.note(f"{who}; step {answer.step} is saved in memory: SIGKILL")
        self.send_signal(next(name for name, one in self.living if one is worker), signal.SIGKILL)

    def _is_missing(self, worker: Worker) -> bool:
        if self._held or self.stopping or worker.seat.rank in self.debugged:  # no regroup is due yet
            return False
        return worker.connected and not worker.spare and not worker.finished and worker.entered < self.generation

    def _fill(self, seat: Seat, name: str | None) -> None:
        if name is None:
            ready = {name: worker.seat.slot for name, worker in self.living if worker.spare and worker.connected}
            name = spares.pick(seat.slot, ready, self._slots(spare=False))
            dead = [name for name, worker in self.workers.items() if worker.code is not None]
            for gone in dead:
                if self.workers[gone].seat.local_rank == seat.local_rank:
                    self._forget(gone)
            if name is None:
                self.start_worker(seat, spare=self._context.plan.spare)
                return
            self.output.renumber(self._assign(self.workers[name], seat, spare=False))
        worker = self.workers[name]
        if worker.connected:
            self._channels.send(worker.pid, self._assignment(worker))

    def _assign(self, worker: Worker, seat: Seat, *, spare: bool) -> dict[int, int]:
        """Give a worker a rank. Returns {old rank: new rank}."""
        own = worker.seat.slot
        # A process cannot change its device.
        was, worker.seat = worker.seat.rank, seat if own.device is None else replace(seat, slot=own)
        if was != seat.rank or worker.spare != spare:
            worker.spare = spare
            if worker.probe is not None:
                worker.probe.set_rank(None if spare else seat.rank)
            self._context.folder.event(
                events.RankChanged(time=time.time(), rank=seat.rank, pid=worker.pid, previous_rank=was)
            )
        return {was: seat.rank}

    def hold(self, why: str) -> None:
        """Let the workers leave their group and wait with their state in memory."""
        self._held = why
        for _, worker in self.living:
            if worker.connected:
                self._channels.send(worker.pid, self._assignment(worker))

    def halt(self, step: int | None) -> None:
        """Have the ranks report their committed step (None), or halt at `step`."""
        self._halt = worker_messages.Halt(step)
        for _, worker in self.living:
            if not worker.spare:
                self._channels.send(worker.pid, self._halt)

    def _keep_spares(self) -> None:
        """Start missing spares, once it is known that the script can regroup. Others would begin to train."""
        plan = self._context.plan
        if not self._readiness[0] or self.stopping or plan.spare or self._spares_lost >= _MOST_SPARES:
            return
        taken = {worker.seat.local_rank for _, worker in self.living}
        free = (place for place in count(len(plan.seats)) if place not in taken)
        for _ in range(plan.spares - sum(worker.spare for _, worker in self.living)):
            place = next(free)
            rank = plan.placement.world_size + place - len(plan.seats)
            slot = Slot()
            if plan.devices_isolated:
                slots = dict.fromkeys([*(seat.slot for seat in plan.seats), *plan.unused])
                slot = spares.slot([*slots], self._slots(spare=False), self._slots(spare=True))
            self.start_worker(Seat(rank, plan.node, place, len(plan.seats), slot), spare=True)

    def _slots(self, *, spare: bool) -> list[Slot]:
        return [worker.seat.slot for _, worker in self.living if worker.spare == spare]

    def _move_store(self, before: socket.socket | None) -> None:
        """Stop or start the store, because another node hosts it from now on or hosted it before."""
        if before is not None:
            asyncio.get_running_loop().remove_reader(before.fileno())
            if self._store_started:
                self._store_stops = True
                self.send_signal("store", signal.SIGTERM)
        self._store_started = False
        self.prepare_store()

    def _assignment(self, worker: Worker) -> worker_messages.FromAgent:
        """Return the assignment of a worker, or Wait if it has no rank."""
        plan, seat = self._context.plan, worker.seat
        preempt = tuple(map(int, plan.shutdown.preempt_signals))
        if worker.spare or self._held:
            return worker_messages.Wait(self._held, preempt)
        rendezvous = plan.rendezvous
        return worker_messages.Assignment(
            generation=self.generation,
            rank=seat.rank,
            world_size=plan.placement.world_size,
            local_rank=0 if plan.virtual_local_rank else seat.local_rank,
            local_world_size=seat.local_world_size,
            node=plan.node,
            nodes=plan.nodes,
            topology=plan.topology,
            address=plan.master_addr,
            port=plan.master_port,
            why=self._why,
            devices=plan.devices(seat),
            **({} if rendezvous is None else {"patience": rendezvous.timeouts.node + _SLACK}),
            halt=self._halts,
            preempt=preempt,
        )

    def is_worker(self, pid: int) -> bool:
        """Return whether a process is a living worker of this group."""
        return self._by_pid(pid) is not None

    def received(self, pid: int, message: worker_messages.FromWorker) -> None:
        """Handle a message of a worker."""
        worker = self._by_pid(pid)
        if worker is None:
            return
        worker.last_heartbeat = time.monotonic()
        match message:
            case worker_messages.Hello():
                worker.enter(WorkerState.CONNECTED)
                self._hellos[worker.seat.local_rank] = message
                self.output.regroups(worker.seat.rank)
                self._channels.send(pid, self._assignment(worker))
                if self._halt is not None and not worker.spare:
                    self._channels.send(pid, self._halt)
                self._report_readiness()
                self._keep_spares()
                if self._heartbeat_watch is None:
                    self._heartbeat_watch = asyncio.get_running_loop().create_task(self._watch_heartbeats())
            case worker_messages.Heartbeat():
                self._set_step(worker, message.step)
                worker.samples, worker.sampled = message.samples, worker.last_heartbeat
            case worker_messages.MeasuredStep() if worker.seat.rank == 0 and not worker.spare:
                self.measured = message
                if self._context.measured is not None:
                    self._context.measured(message)
            case worker_messages.Entering():
                worker.entered, worker.holds = message.generation, message.holds
            case worker_messages.FirstStep():
                self._set_step(worker, message.step)
                worker.formed = message.generation
                self._context.first_step(message)
            case worker_messages.Done():
                worker.enter(WorkerState.FINISHED)
                self._report_readiness()
            case worker_messages.HaltAck():
                self._set_step(worker, message.step)
                self._context.halt_message(worker.seat.rank, message)
            case worker_messages.Rescued():
                self._rescued(worker, message)
            case worker_messages.Keeping() | worker_messages.HaltedAt():
                self._context.halt_message(worker.seat.rank, message)

    def _set_step(self, worker: Worker, step: int) -> None:
        slot_step = worker.probe.step if worker.probe is not None else 0
        worker.steps_match = abs(slot_step - worker.slot_step - step + (worker.step or 0)) <= 1
        worker.step, worker.slot_step = step, slot_step

    async def _watch_heartbeats(self) -> None:
        """Kill workers without a heartbeat: they are stopped or hold the interpreter lock, and others wait for them."""
        while True:
            await asyncio.sleep(1.0)
            limit = self._context.plan.recovery.worker_timeout
            for name, worker in self.living:
                if worker.seat.rank in self.debugged:
                    worker.last_heartbeat = worker.last_heartbeat and time.monotonic()
                silent = time.monotonic() - worker.last_heartbeat
                if worker.last_heartbeat and not worker.finished and silent > limit:
                    worker.last_heartbeat = 0.0
                    how = f"{linux.state(worker.pid)}{_last_seen(worker)}"
                    self._context.note(f"rank {worker.seat.rank} is silent for {silent:.0f} s ({how}): SIGKILL")
                    self.send_signal(name, signal.SIGKILL)

    def _by_pid(self, pid: int) -> Worker | None:
        return next((worker for _, worker in self.living if worker.pid == pid), None)

    # -- failures

    def explain_failures(self, kills: str) -> tuple[list[root_cause.ProcessFailure], str]:
        """Return all failures and the message about the first. `kills`: what the kernel reports about memory."""
        deaths = [self.process_failure(worker, kills) for worker in self.failed]
        death = root_cause.first_cause(deaths)
        if death is None:
            return deaths, ""
        worker = next(worker for worker in self.failed if worker.seat.rank == death.rank)
        tail = [line for line in self.output.tail(death.rank, "stdout", 5) if line.strip()]
        here = {one.seat.rank for one in self.workers.values()}
        well = {one.seat.rank for one in self.workers.values() if one.code == 0 and one.ended <= death.time}
        left = sorted(well | (here & root_cause.lost(death)))
        mismatches = {one.seat.rank: one.mismatch for one in self.workers.values() if one.mismatch is not None}
        means = mismatch.words(mismatches) if root_cause.differs(death) else ()
        return deaths, root_cause.block(death, tail=tail, folder=worker.folder, left=left, means=means)

    def process_failure(self, worker: Worker, kills: str = "") -> root_cause.ProcessFailure:
        """Return what is known of a worker that has ended."""
        error = ""
        with contextlib.suppress(OSError), open(f"{worker.folder}/error.json", errors="replace") as file:
            error = file.read(1 << 20)
        code = worker.code or 0
        return root_cause.ProcessFailure(
            rank=worker.seat.rank,
            code=code,
            time=worker.ended,
            stopped=worker.stopped,
            hung=worker.hung,
            device=str(worker.seat.slot.device or ""),
            error=error,
            stderr=self.output.tail(worker.seat.rank, "stderr", _DUMP if code < 0 else _TAIL),
            memory=kills if code == -signal.SIGKILL else "",
            stop_sent=worker.stop_sent,
            blame=worker.blame,
        )


def _last_seen(worker: Worker) -> str:
    """Return where its main thread was, if known."""
    place = worker.probe.status.text.get("place") if worker.probe is not None else None
    return f", last seen at {os.path.basename(place[0])}:{place[1]} in {place[2]}" if place else ""
