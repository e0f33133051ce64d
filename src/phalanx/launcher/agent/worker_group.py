"""One life of the group, from the first fork to the last exit: its workers, its store, its output."""

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

_MOST_STORES = 3  # that are replaced in one attempt: one that cannot start would be replaced for ever
_MOST_SPARES = 3  # likewise
_TAIL = 60  # last lines of stderr that may say why a worker failed
_DUMP = 400  # likewise, of one that crashed: faulthandler writes the stacks of all threads
_LOOK = 0.1  # seconds between two looks at who has come
_ENDS = 10.0  # seconds for a worker to end when an exception has ended its script
_SLACK = 5.0  # seconds for a loss to be told everywhere, once it is known


@dataclass(frozen=True)
class WorkerGroupContext:
    """What all attempts of a run share."""

    plan: Plan
    folder: RunFolder
    console: Console
    listener: socket.socket | None  # the store's, bound once: an attempt's store is new, its address is not
    note: Callable[[str], None]
    worker_failed: Callable[
        [WorkerFailure], None
    ]  # called when a worker has failed; what is decided comes in a later call
    regroup_ready: Callable[
        [bool, bool, bool], None
    ]  # workers that can regroup have called; some are through; all have called
    first_step: Callable[
        [worker_messages.FirstStep], None
    ]  # the first step of a group that has formed anew is committed
    halt_message: Callable[
        [int, worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt], None
    ]  # what a rank says about a halt
    log_forwarder: LogForwarder | None = None  # who else reads what workers write
    echo: bool = True  # it is shown here
    memory: str = ""  # where workers get memory that outlives them; empty: nowhere
    board: StatusBoard | None = None  # where workers publish what they are at
    probe_message: Callable[[str, wire.Message, list[int]], None] | None = None  # what a probe says unasked
    measured: Callable[[worker_messages.MeasuredStep], None] | None = None  # what rank 0 says of its steps
    blame: Blame | None = None  # who made a rank time out


class WorkerGroup:
    def __init__(
        self,
        number: int,
        context: WorkerGroupContext,
        fork_server: ForkServerClient,
        preload_hints: PreloadHints | None,
        generation: int = 0,
    ) -> None:
        self.number = number
        self.workers: dict[str, Worker] = {}  # by names that are given once: ranks may change
        self.output = OutputCapture(
            asyncio.get_running_loop(), context.console, forwarder=context.log_forwarder, echo=context.echo
        )
        self.over = asyncio.Event()
        self.debugged: frozenset[int] = frozenset()  # ranks at a debugger, on any node: others wait for them
        self.generation = generation
        self.measured: worker_messages.MeasuredStep | None = None  # what rank 0 has said last
        self._why = ""  # this generation is not the first
        self._held = ""  # why they wait: too few are left
        self._names = map(str, count())
        self._spares_lost = 0
        self._hellos: dict[int, worker_messages.Hello] = {}  # by local rank, what the last worker said of itself
        self._halts = False  # it saves what there is, and ends
        self._halt: worker_messages.Halt | None = None  # what was said of halting last
        self._channels = WorkerChannels(self)
        self._heartbeat_watch: asyncio.Task[None] | None = None
        self._missing: asyncio.Task[None] | None = None  # looks for survivors that do not come to a new group
        self._saving: set[int] = set()  # processes that save what they hold, as far as they have not said otherwise
        self._readiness = (False, False, False)  # as it was told
        self._context = context
        self._fork_server = fork_server
        self._preload_hints = preload_hints
        self._variables_set: list[dict[str, str | None]] = []  # variables that ranks set before they imported torch
        self._store_started = False
        self._store_stops = False  # it is no longer needed
        self._stores_lost = 0
        self._escalation: asyncio.Task[None] | None = None
        self._timeout_victims = TimeoutVictims(self, context.blame, self._timed_out)
        context.folder.event(events.AttemptStarted(time=time.time(), attempt=number))
        self._open_duplicates()

    @property
    def living(self) -> list[tuple[str, Worker]]:
        return [(name, worker) for name, worker in self.workers.items() if worker.code is None]

    @property
    def ranks(self) -> dict[int, int]:
        """pid -> rank, of the dead too."""
        return {worker.pid: worker.seat.rank for worker in self.workers.values()}

    @property
    def full(self) -> bool:
        """Every seat is taken, by a worker that is alive."""
        return sum(not worker.spare for _, worker in self.living) == len(self._context.plan.seats)

    @property
    def world_size(self) -> int:
        return self._context.plan.placement.world_size

    @property
    def silence(self) -> float:
        """Seconds after which a rank that is silent is lost."""
        return self._context.plan.recovery.worker_timeout

    @property
    def formed(self) -> bool:
        """Every rank of this node has committed a step of this generation."""
        return all(worker.formed == self.generation for worker in self.workers.values() if not worker.spare)

    @property
    def stopping(self) -> bool:
        return self._escalation is not None

    @property
    def ending(self) -> bool:
        """A rank has raised an exception about others, and is about to end: what moves now is no progress."""
        return any(worker.ending > time.monotonic() for worker in self.workers.values())

    @property
    def held(self) -> str:
        """Why its ranks wait, and are meant to; empty: they are not."""
        return self._held

    @property
    def failed(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.code and not worker.spare]

    def _report_readiness(self) -> None:
        """One that has not called yet is told where it stands when it does; a plain script never calls."""
        workers = [worker for worker in self.workers.values() if not worker.spare or self._context.plan.spare]
        ended = any(worker.finished or worker.code == 0 for worker in workers if not worker.spare)
        called = self._readiness[0] or any(worker.connected for worker in workers)
        readiness = (called, ended, all(worker.connected for worker in workers))
        if readiness != self._readiness:
            self._readiness = readiness
            self._context.regroup_ready(*readiness)

    def _open_duplicates(self) -> None:
        """torchrun's --duplicate-stdout-filters: chosen lines of all ranks once more, in one file."""
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

    # -- birth

    def prepare_store(self) -> None:
        """Where torch is imported already a store costs a fork, so it is there before anybody asks. Elsewhere it
        costs an import, so it is started by the first connection: many programs never make one."""
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
        plan, run_folder = self._context.plan, self._context.folder
        name = next(self._names)
        label = f"spare.{name}" if spare else str(seat.rank)
        folder = run_folder.rank_folder(self.number, label)
        if any(worker.folder == folder for _, worker in self.living):  # of one that had this rank before
            folder = run_folder.rank_folder(self.number, f"{label}.{self.generation}")
        with contextlib.suppress(OSError):  # of the one before
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
            self._forget(name)  # the fork server is gone: its reader says so
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
        """What a worker's probe says unasked."""
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
        """Its script has set variables that the fork server's imports have read before: the next run knows."""
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
        """Ours for one rank, and only while the terminal is ours to read from; nothing for the others.

        A script that came by standard input (`phalanx run -`) is for every rank, which reads it from its beginning.
        """
        if self._context.plan.command.kind == "stdin":
            return os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
        if rank == self._context.plan.stdin_rank and not self._context.console.hidden:
            with contextlib.suppress(OSError):
                if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                    return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def worker_started(self, name: str, pid: int) -> None:
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

    # -- death

    def worker_exited(self, message: wire.Message) -> None:
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
                return  # whoever decides about it has them regroup, or stops what is left
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
        """It is known who made them, as far as that can be known. Others may have failed meanwhile."""
        for worker in victims:
            if not self.stopping:
                self._report_failure(worker)
        if self.stopping:
            self._check_end()

    def _check_end(self) -> None:
        """Spares of this node have nobody left to stand in for."""
        if self._timeout_victims.asking:  # it is looked again when they have told
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
        told = f"a spare worker ended ({root_cause.in_words(code)}); see {worker.folder}"
        if self._spares_lost >= _MOST_SPARES:
            self._context.note(f"{told}. It is the third, so that there are no more")
        else:
            self._context.note(told)
            self.start_worker(worker.seat, spare=True)

    def shared_failure(self, reason: str, place: str) -> WorkerFailure:
        """Describe the failure of something that all workers depend on."""
        return self._make_failure(reason, list(self.workers.values()), place, everybody=not self.living)

    def _make_failure(
        self, reason: str, workers: list[Worker], place: str, generation: int = -1, *, everybody: bool = False
    ) -> WorkerFailure:
        steps = [other.step for other in self.workers.values() if other.step is not None]
        return WorkerFailure(
            rank=min((worker.seat.rank for worker in workers), default=0),
            reason=reason,
            place=place,
            time=time.time(),
            lived=time.monotonic() - min((worker.born for worker in workers), default=time.monotonic()),
            step=max(steps, default=None),
            everybody=everybody,
            generation=generation,
        )

    def start_refused(self, name: str, why: str) -> None:
        """A process that the kernel would not make."""
        who = f"rank {self.workers[name].seat.rank}" if name in self.workers else "the store"
        self._context.console.say(f"{who} could not be started: {why}")
        if name in self.workers:
            self.worker_exited({"name": name, "pid": 0, "status": 1 << 8, "peak": 0})

    def _store_exited(self, code: int) -> None:
        """Without its store a group cannot form, nor grow; what has formed goes on by itself."""
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
        if self._readiness[:2] == (True, False) and not self.formed:  # who had told the old one waits for ever
            self._context.worker_failed(
                self.shared_failure("the store was ended while the group formed", place="store")
            )

    def fork_server_lost(self) -> None:
        """The fork server is gone, and its workers with it."""
        for name, worker in self.living:
            worker.enter(WorkerState.STOPPING)  # it has not failed by itself
            self._set_exited(worker, -signal.SIGKILL)
            self._probe_message(name, {"is": "gone"}, [])
        self._store_started = False

    def use_fork_server(self, fork_server: ForkServerClient) -> None:
        """To another fork server: the old one is gone, and so are its store and its workers."""
        self._fork_server = fork_server
        self.prepare_store()

    def send_signal(self, name: str, number: int, *, alone: bool = False) -> None:
        """To a worker and all it has started, or to it alone."""
        with contextlib.suppress(OSError):
            self._fork_server.send({"do": "signal", "name": name, "signal": int(number), "alone": alone})

    def end_as(self, name: str, code: int) -> None:
        """End a worker whose script is over and whose process hangs: it counts as one that has ended with `code`."""
        self.workers[name].ends_as = code
        self.send_signal(name, signal.SIGKILL, alone=True)

    def stop(self, number: signal.Signals, reason: str, grace: float, *, already_sent: bool = False) -> None:
        """Tell the living to stop, unless they were told; those that do not, are stopped."""
        self._context.folder.event(events.Stopping(time=time.time(), reason=reason, signal=number.name))
        for name, worker in self.living:
            worker.enter(WorkerState.STOPPING)
            worker.stop_sent = time.time()
            if worker.seat.rank in self.debugged and number == signal.SIGINT:  # which a debugger takes for itself
                self.send_signal(name, signal.SIGTERM)
            elif not already_sent:
                self.send_signal(name, number)
            self._channels.send(worker.pid, worker_messages.EndWorker(number))
        if self._escalation is None:
            self._escalation = asyncio.get_running_loop().create_task(self._escalate(number, grace))

    async def _escalate(self, number: signal.Signals, grace: float) -> None:
        """A worker inside native code never gets to its handler for SIGINT; one may ignore SIGTERM; none SIGKILL."""
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
        for name, _ in self.living:
            self.send_signal(name, signal.SIGKILL)

    def close(self) -> None:
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

    # -- a group that forms anew

    def regroup(self, to: RegroupPlan) -> None:
        """The dead are replaced, by a spare if there is one, and the living told."""
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
        """One that cannot leave the old group keeps all from forming the next."""
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
        """It may have come loose meanwhile; then it has no need of that."""
        self._saving.discard(worker.pid)
        if not self._is_missing(worker):
            return
        who = f"rank {worker.seat.rank} cannot leave the group"
        if answer.step is None:
            if worker.formed >= 0:  # else it has nothing that could be lost
                self._context.note(f"{who}, nobody else has the state, and it cannot save that: {answer.why}")
            return
        self._context.note(f"{who}; step {answer.step} is saved in memory: SIGKILL")
        self.send_signal(next(name for name, one in self.living if one is worker), signal.SIGKILL)

    def _is_missing(self, worker: Worker) -> bool:
        if self._held or self.stopping or worker.seat.rank in self.debugged:  # nobody is to come, or not yet
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
        """Its rank before, and now."""
        own = worker.seat.slot
        # A process keeps the device that it has.
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
        """Nobody can go on: the living leave their group, and keep what they have."""
        self._held = why
        for _, worker in self.living:
            if worker.connected:
                self._channels.send(worker.pid, self._assignment(worker))

    def halt(self, step: int | None) -> None:
        self._halt = worker_messages.Halt(step)
        for _, worker in self.living:
            if not worker.spare:
                self._channels.send(worker.pid, self._halt)

    def _keep_spares(self) -> None:
        """As soon as it is known that the script can regroup: any other would begin to train."""
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
        """To another node, or from it."""
        if before is not None:
            asyncio.get_running_loop().remove_reader(before.fileno())
            if self._store_started:
                self._store_stops = True
                self.send_signal("store", signal.SIGTERM)
        self._store_started = False
        self.prepare_store()

    def _assignment(self, worker: Worker) -> worker_messages.FromAgent:
        """What a worker is told about where it stands."""
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
            **({} if rendezvous is None else {"patience": rendezvous.node_timeout + _SLACK}),
            halt=self._halts,
            preempt=preempt,
        )

    def is_worker(self, pid: int) -> bool:
        return self._by_pid(pid) is not None

    def received(self, pid: int, message: worker_messages.FromWorker) -> None:
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
        """A rank that gives no sign of life is stopped, or holds Python's lock for good: the others wait for it."""
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

    # -- afterwards

    def explain_failures(self, kills: str) -> tuple[list[root_cause.ProcessFailure], str]:
        """All who failed, and what to tell about the first. `kills`: what the kernel says about memory."""
        deaths = [self.process_failure(worker, kills) for worker in self.failed]
        death = root_cause.first_cause(deaths)
        if death is None:
            return deaths, ""
        worker = next(worker for worker in self.failed if worker.seat.rank == death.rank)
        tail = [line for line in self.output.tail(death.rank, "stdout", 5) if line.strip()]
        here = {one.seat.rank for one in self.workers.values()}
        well = {one.seat.rank for one in self.workers.values() if one.code == 0 and one.ended <= death.time}
        left = sorted(well | (here & root_cause.lost(death)))
        told = {one.seat.rank: one.mismatch for one in self.workers.values() if one.mismatch is not None}
        means = mismatch.words(told) if root_cause.differs(death) else ()
        return deaths, root_cause.block(death, tail=tail, folder=worker.folder, left=left, means=means)

    def process_failure(self, worker: Worker, kills: str = "") -> root_cause.ProcessFailure:
        """What is known of a worker that has ended."""
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
    """Where its main thread was, as far as it has shown."""
    place = worker.probe.status.text.get("place") if worker.probe is not None else None
    return f", last seen at {os.path.basename(place[0])}:{place[1]} in {place[2]}" if place else ""
