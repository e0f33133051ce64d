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
from phalanx.contract import events
from phalanx.contract import worker_messages as words
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
    failing: Callable[[WorkerFailure], None]  # called when a worker has failed; what is decided comes in a later call
    able: Callable[[bool, bool, bool], None]  # workers that can regroup have called; some are through; all have called
    going: Callable[[words.FirstStep], None]  # the first step of a group that has formed anew is committed
    halting: Callable[[int, words.Keeping | words.HaltAck | words.HaltedAt], None]  # what a rank says about a halt
    relay: LogForwarder | None = None  # who else reads what workers write
    echo: bool = True  # it is shown here
    memory: str = ""  # where workers get memory that outlives them; empty: nowhere
    board: StatusBoard | None = None  # where workers publish what they are at
    witnessed: Callable[[str, wire.Message, list[int]], None] | None = None  # what a probe says unasked
    measured: Callable[[words.MeasuredStep], None] | None = None  # what rank 0 says of its steps
    blame: Blame | None = None  # who made a rank time out


class WorkerGroup:
    def __init__(
        self,
        number: int,
        stage: WorkerGroupContext,
        fork_server: ForkServerClient,
        lesson: PreloadHints | None,
        generation: int = 0,
    ) -> None:
        self.number = number
        self.workers: dict[str, Worker] = {}  # by names that are given once: ranks may change
        self.output = OutputCapture(asyncio.get_running_loop(), stage.console, forwarder=stage.relay, echo=stage.echo)
        self.over = asyncio.Event()
        self.debugged: frozenset[int] = frozenset()  # ranks at a debugger, on any node: others wait for them
        self.generation = generation
        self.measured: words.MeasuredStep | None = None  # what rank 0 has said last
        self._why = ""  # this generation is not the first
        self._held = ""  # why they wait: too few are left
        self._names = map(str, count())
        self._spares_lost = 0
        self._called: dict[int, words.Hello] = {}  # by local rank, what the last worker said of itself
        self._halts = False  # it saves what there is, and ends
        self._halt: words.Halt | None = None  # what was said of halting last
        self._line = WorkerChannels(self)
        self._listening: asyncio.Task[None] | None = None
        self._missing: asyncio.Task[None] | None = None  # looks for survivors that do not come to a new group
        self._saving: set[int] = set()  # processes that save what they hold, as far as they have not said otherwise
        self._able = (False, False, False)  # as it was told
        self._stage = stage
        self._fork_server = fork_server
        self._lesson = lesson
        self._set: list[dict[str, str | None]] = []  # variables that ranks set before they imported torch
        self._store_started = False
        self._store_stops = False  # it is no longer needed
        self._stores_lost = 0
        self._escalation: asyncio.Task[None] | None = None
        self._victims = TimeoutVictims(self, stage.blame, self._timed_out)
        stage.folder.event(events.AttemptStarted(time=time.time(), attempt=number))
        self._duplicate()

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
        return sum(not worker.spare for _, worker in self.living) == len(self._stage.plan.seats)

    @property
    def world_size(self) -> int:
        return self._stage.plan.placement.world_size

    @property
    def silence(self) -> float:
        """Seconds after which a rank that is silent is lost."""
        return self._stage.plan.recovery.worker_timeout

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

    def _tell_able(self) -> None:
        """One that has not called yet is told where it stands when it does; a plain script never calls."""
        workers = [worker for worker in self.workers.values() if not worker.spare or self._stage.plan.spare]
        ended = any(worker.finished or worker.code == 0 for worker in workers if not worker.spare)
        called = self._able[0] or any(worker.connected for worker in workers)
        able = (called, ended, all(worker.connected for worker in workers))
        if able != self._able:
            self._able = able
            self._stage.able(*able)

    def _duplicate(self) -> None:
        """torchrun's --duplicate-stdout-filters: chosen lines of all ranks once more, in one file."""
        plan = self._stage.plan
        output = plan.output
        if not output.stdout_filters and not output.stderr_filters:
            return
        folder = self._stage.folder.attempt_folder(self.number)
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
        listener = self._stage.listener
        if listener is None:  # another node hosts it
            return
        if self._fork_server.forks:
            self._start_store()
        else:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._start_store)

    def _start_store(self) -> None:
        listener = self._stage.listener
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener.fileno())
        if self._store_started or self.over.is_set():
            return
        self._store_started, self._store_stops = True, False
        plan, path = self._stage.plan, self._stage.folder.path
        order = fork_servers.store_order(self._fork_server, plan, plan.master_port)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = os.open(f"{path}/store.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            self._fork_server.send(order, [nowhere, log, log, listener.fileno()])
        os.close(nowhere)
        os.close(log)

    def start_worker(self, seat: Seat, *, spare: bool = False) -> None:
        plan, run_folder = self._stage.plan, self._stage.folder
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
            line=self._line.name,
            memory=self._stage.memory,
        )
        order = fork_servers.worker_order(self._fork_server, name, plan.command, seat, environ)
        if self._lesson is not None:
            order["assumed"] = list(self._lesson.variables)
            if seat.rank == 0 and self._fork_server.way == "cold":
                order["hints"] = self._lesson.path
        if (device := cuda_device(self._called.get(seat.local_rank), environ)) is not None:
            order["cuda"] = device
        output = plan.output
        out, err = self.output.open(
            seat.rank, folder, show=output.shown(seat), terminal=seat.rank == 0, apart=output.separate(seat)
        )
        stdin = self._stdin(seat.rank)
        probe = self._probe(name)
        if probe is not None:
            order["probe"] = probe.slot
            probe.seat(None if spare else seat.rank)
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
        board = self._stage.board
        slot = board.take() if board is not None else None
        if board is None or slot is None:
            return None
        return ProbeClient(board, slot, lambda message, fds: self._witnessed(name, message, fds))

    def _witnessed(self, name: str, message: wire.Message, fds: list[int]) -> None:
        """What a worker's probe says unasked."""
        if message.get("is") == "mismatch" and name in self.workers:
            self.workers[name].differs = message
        elif message.get("is") == "stale" and name in self.workers:
            self._imported_too_early(self.workers[name], message)
        elif message.get("is") == "raised" and name in self.workers:
            self.workers[name].raised, self.workers[name].ending = message, time.monotonic() + _ENDS
        elif self._stage.witnessed is not None:
            self._stage.witnessed(name, message, fds)
        else:
            for fd in fds:
                os.close(fd)

    def _imported_too_early(self, worker: Worker, message: wire.Message) -> None:
        """Its script has set variables that the fork server's imports have read before: the next run knows."""
        if not message["late"]:
            self.output.repeats(worker.seat.rank)
        if self._lesson is None:
            return
        if not self._set:
            does = "ignored there" if message["late"] else "starting it again as a fresh interpreter"
            names = ", ".join(message["variables"])
            self._stage.note(f"rank {worker.seat.rank} set {names} before an import that reads it: {does}")
        self._set.append(message["variables"])
        self._lesson.learned(self._set).save()
        if message["late"]:
            self._lesson.refuse()

    def _stdin(self, rank: int) -> int:
        """Ours for one rank, and only while the terminal is ours to read from; nothing for the others.

        A script that came by standard input (`phalanx run -`) is for every rank, which reads it from its beginning.
        """
        if self._stage.plan.command.kind == "stdin":
            return os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
        if rank == self._stage.plan.stdin_rank and not self._stage.console.hidden:
            with contextlib.suppress(OSError):
                if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                    return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def born(self, name: str, pid: int) -> None:
        if name not in self.workers:
            return
        worker = self.workers[name]
        worker.pid = pid
        worker.enter(WorkerState.RUNNING)
        self._stage.folder.event(
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

    def exited(self, message: wire.Message) -> None:
        code = os.waitstatus_to_exitcode(message["status"])
        if message["name"] == "store":
            self._store_exited(code)
            return
        worker = self.workers[message["name"]]
        if code == -signal.SIGKILL and worker.ends_as is not None:
            code = worker.ends_as
        self._line.drain(worker.pid)
        self._ended(worker, code)
        if worker.probe is not None:
            worker.probe.seat(None)
        self._witnessed(message["name"], {"is": "gone"}, [])
        self._stage.folder.event(
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
            self._tell_able()
        elif not worker.stopped:
            if self.stopping or not self._victims.take(worker):
                self._failed(worker)
            if not self.stopping:
                return  # whoever decides about it has them regroup, or stops what is left
        self._look_for_the_end()

    def _ended(self, worker: Worker, code: int) -> None:
        worker.enter(WorkerState.EXITED)
        worker.code, worker.ended = code, time.time()

    def _failed(self, worker: Worker) -> None:
        death = self.death(worker)
        self._stage.failing(self._failure(root_cause.summary(death), [worker], root_cause.place(death), worker.entered))

    def _timed_out(self, victims: list[Worker]) -> None:
        """It is known who made them, as far as that can be known. Others may have failed meanwhile."""
        for worker in victims:
            if not self.stopping:
                self._failed(worker)
        if self.stopping:
            self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        """Spares of this node have nobody left to stand in for."""
        if self._victims.asking:  # it is looked again when they have told
            return
        if not self.living:
            self.over.set()
        elif not self._stage.plan.spare and all(worker.spare for _, worker in self.living):
            for name, worker in self.living:
                worker.enter(WorkerState.STOPPING)
                self.tell(name, signal.SIGKILL)

    def _spare_exited(self, name: str, worker: Worker, code: int) -> None:
        if worker.stopped or self.stopping:
            return
        self._spares_lost += 1
        self._forget(name)
        told = f"a spare worker ended ({root_cause.in_words(code)}); see {worker.folder}"
        if self._spares_lost >= _MOST_SPARES:
            self._stage.note(f"{told}. It is the third, so that there are no more")
        else:
            self._stage.note(told)
            self.start_worker(worker.seat, spare=True)

    def fall(self, reason: str, place: str) -> WorkerFailure:
        """Describe the failure of something that all workers depend on."""
        return self._failure(reason, list(self.workers.values()), place, everybody=not self.living)

    def _failure(
        self, reason: str, workers: list[Worker], place: str, generation: int = -1, *, everybody: bool = False
    ) -> WorkerFailure:
        steps = [other.step for other in self.workers.values() if other.step is not None]
        return WorkerFailure(
            rank=min((fallen.seat.rank for fallen in workers), default=0),
            reason=reason,
            place=place,
            time=time.time(),
            lived=time.monotonic() - min((fallen.born for fallen in workers), default=time.monotonic()),
            step=max(steps, default=None),
            everybody=everybody,
            generation=generation,
        )

    def refused(self, name: str, why: str) -> None:
        """A process that the kernel would not make."""
        who = f"rank {self.workers[name].seat.rank}" if name in self.workers else "the store"
        self._stage.console.say(f"{who} could not be started: {why}")
        if name in self.workers:
            self.exited({"name": name, "pid": 0, "status": 1 << 8, "peak": 0})

    def _store_exited(self, code: int) -> None:
        """Without its store a group cannot form, nor grow; what has formed goes on by itself."""
        if self.over.is_set() or not self.living or self._store_stops:
            return
        self._stage.folder.event(events.StoreLost(time=time.time(), code=code))
        self._stores_lost += 1
        if self._stores_lost > _MOST_STORES:
            self._stage.note(f"the store process ends again and again; see {self._stage.folder.path}/store.log")
            return
        self._stage.note(f"the store process ended ({root_cause.in_words(code)}); a new one takes its place, empty")
        self._store_started = False
        self._start_store()
        if self._able[:2] == (True, False) and not self.formed:  # who had told the old one waits for ever
            self._stage.failing(self.fall("the store was ended while the group formed", place="store"))

    def lost(self) -> None:
        """The fork server is gone, and its workers with it."""
        for name, worker in self.living:
            worker.enter(WorkerState.STOPPING)  # it has not failed by itself
            self._ended(worker, -signal.SIGKILL)
            self._witnessed(name, {"is": "gone"}, [])
        self._store_started = False

    def transplant(self, fork_server: ForkServerClient) -> None:
        """To another fork server: the old one is gone, and so are its store and its workers."""
        self._fork_server = fork_server
        self.prepare_store()

    def tell(self, name: str, number: int, *, alone: bool = False) -> None:
        """To a worker and all it has started, or to it alone."""
        with contextlib.suppress(OSError):
            self._fork_server.send({"do": "signal", "name": name, "signal": int(number), "alone": alone})

    def end_as(self, name: str, code: int) -> None:
        """End a worker whose script is over and whose process hangs: it counts as one that has ended with `code`."""
        self.workers[name].ends_as = code
        self.tell(name, signal.SIGKILL, alone=True)

    def stop(self, number: signal.Signals, reason: str, grace: float, *, told: bool = False) -> None:
        """Tell the living to stop, unless they were told; those that do not, are stopped."""
        self._stage.folder.event(events.Stopping(time=time.time(), reason=reason, signal=number.name))
        for name, worker in self.living:
            worker.enter(WorkerState.STOPPING)
            worker.told = time.time()
            if worker.seat.rank in self.debugged and number == signal.SIGINT:  # which a debugger takes for itself
                self.tell(name, signal.SIGTERM)
            elif not told:
                self.tell(name, number)
            self._line.send(worker.pid, words.EndWorker(number))
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
                self._stage.note(f"rank {worker.seat.rank} has not stopped after {wait:.0f} s: {next_signal.name}")
                self.tell(name, next_signal)
                self._line.send(worker.pid, words.EndWorker(next_signal))

    def kill(self) -> None:
        for name, _ in self.living:
            self.tell(name, signal.SIGKILL)

    def concluded(self) -> None:
        if self._stage.listener is not None:
            asyncio.get_running_loop().remove_reader(self._stage.listener.fileno())
        if self._escalation is not None:
            self._escalation.cancel()
        self._line.close()
        for worker in self.workers.values():
            if worker.probe is not None:
                worker.probe.close()
        self._victims.cancel()
        for task in (self._listening, self._missing):
            if task is not None:
                task.cancel()

    # -- a group that forms anew

    def regroup(self, to: RegroupPlan) -> None:
        """The dead are replaced, by a spare if there is one, and the living told."""
        before, self._stage = self._stage, replace(self._stage, plan=to.plan, listener=to.listener)
        self.generation, self._why, self._held, self._halts = to.generation, to.why, "", to.halt
        if to.listener is not before.listener:
            self._move_store(before.listener)
        at = {worker.seat.local_rank: name for name, worker in self.living}
        ranks: dict[int, int] = {}
        for seat in to.plan.seats:
            name = at.get(seat.local_rank)
            if name is not None:
                ranks |= self._seat(self.workers[name], seat, spare=to.plan.spare)
        self.output.renumber(ranks)
        for seat in to.plan.seats:
            self._fill(seat, at.get(seat.local_rank))
        self._keep_spares()
        self._tell_able()
        if self._missing is not None:
            self._missing.cancel()
        self._missing = asyncio.get_running_loop().create_task(self._look_for_missing())

    async def _look_for_missing(self) -> None:
        """One that cannot leave the old group keeps all from forming the next."""
        stuck, asked = Unresponsive(), set[int]()
        while missing := {worker.pid: name for name, worker in self.living if self._is_missing(worker)}:
            safe = any(worker.holds and worker.entered == self.generation for _, worker in self.living)
            patience = ON_GPU if any(worker.seat.slot.device is not None for _, worker in self.living) else PATIENCE
            for pid in stuck.among(missing.keys() - asked, patience) if not safe else ():
                asked.add(pid)
                self._saving.add(pid)
                self._line.send(pid, words.Rescue())
            for pid in stuck.among(missing, patience if safe else LAST):
                if not safe and pid in self._saving and not stuck.among([pid], SAVING):
                    continue
                self._stage.note(f"rank {self.workers[missing[pid]].seat.rank} cannot leave the group: SIGKILL")
                self.tell(missing[pid], signal.SIGKILL)
                stuck = Unresponsive()
            await asyncio.sleep(_LOOK)

    def _rescued(self, worker: Worker, told: words.Rescued) -> None:
        """It may have come loose meanwhile; then it has no need of that."""
        self._saving.discard(worker.pid)
        if not self._is_missing(worker):
            return
        who = f"rank {worker.seat.rank} cannot leave the group"
        if told.step is None:
            if worker.formed >= 0:  # else it has nothing that could be lost
                self._stage.note(f"{who}, nobody else has the state, and it cannot save that: {told.why}")
            return
        self._stage.note(f"{who}; step {told.step} is saved in memory: SIGKILL")
        self.tell(next(name for name, one in self.living if one is worker), signal.SIGKILL)

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
                self.start_worker(seat, spare=self._stage.plan.spare)
                return
            self.output.renumber(self._seat(self.workers[name], seat, spare=False))
        worker = self.workers[name]
        if worker.connected:
            self._line.send(worker.pid, self._place(worker))

    def _seat(self, worker: Worker, seat: Seat, *, spare: bool) -> dict[int, int]:
        """Its rank before, and now."""
        own = worker.seat.slot
        # A process keeps the device that it has.
        was, worker.seat = worker.seat.rank, seat if own.device is None else replace(seat, slot=own)
        if was != seat.rank or worker.spare != spare:
            worker.spare = spare
            if worker.probe is not None:
                worker.probe.seat(None if spare else seat.rank)
            self._stage.folder.event(
                events.RankChanged(time=time.time(), rank=seat.rank, pid=worker.pid, previous_rank=was)
            )
        return {was: seat.rank}

    def hold(self, why: str) -> None:
        """Nobody can go on: the living leave their group, and keep what they have."""
        self._held = why
        for _, worker in self.living:
            if worker.connected:
                self._line.send(worker.pid, self._place(worker))

    def halt(self, step: int | None) -> None:
        self._halt = words.Halt(step)
        for _, worker in self.living:
            if not worker.spare:
                self._line.send(worker.pid, self._halt)

    def _keep_spares(self) -> None:
        """As soon as it is known that the script can regroup: any other would begin to train."""
        plan = self._stage.plan
        if not self._able[0] or self.stopping or plan.spare or self._spares_lost >= _MOST_SPARES:
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
                self.tell("store", signal.SIGTERM)
        self._store_started = False
        self.prepare_store()

    def _place(self, worker: Worker) -> words.FromAgent:
        """What a worker is told about where it stands."""
        plan, seat = self._stage.plan, worker.seat
        preempt = tuple(map(int, plan.shutdown.preempt_signals))
        if worker.spare or self._held:
            return words.Wait(self._held, preempt)
        gathering = plan.rendezvous
        return words.Assignment(
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
            **({} if gathering is None else {"patience": gathering.node_timeout + _SLACK}),
            halt=self._halts,
            preempt=preempt,
        )

    def knows(self, pid: int) -> bool:
        return self._with(pid) is not None

    def said(self, pid: int, message: words.FromWorker) -> None:
        worker = self._with(pid)
        if worker is None:
            return
        worker.heard = time.monotonic()
        match message:
            case words.Hello():
                worker.enter(WorkerState.CONNECTED)
                self._called[worker.seat.local_rank] = message
                self.output.regroups(worker.seat.rank)
                self._line.send(pid, self._place(worker))
                if self._halt is not None and not worker.spare:
                    self._line.send(pid, self._halt)
                self._tell_able()
                self._keep_spares()
                if self._listening is None:
                    self._listening = asyncio.get_running_loop().create_task(self._listen())
            case words.Heartbeat():
                self._reached(worker, message.step)
                worker.samples, worker.sampled = message.samples, worker.heard
            case words.MeasuredStep() if worker.seat.rank == 0 and not worker.spare:
                self.measured = message
                if self._stage.measured is not None:
                    self._stage.measured(message)
            case words.Entering():
                worker.entered, worker.holds = message.generation, message.holds
            case words.FirstStep():
                self._reached(worker, message.step)
                worker.formed = message.generation
                self._stage.going(message)
            case words.Done():
                worker.enter(WorkerState.FINISHED)
                self._tell_able()
            case words.HaltAck():
                self._reached(worker, message.step)
                self._stage.halting(worker.seat.rank, message)
            case words.Rescued():
                self._rescued(worker, message)
            case words.Keeping() | words.HaltedAt():
                self._stage.halting(worker.seat.rank, message)

    def _reached(self, worker: Worker, step: int) -> None:
        paged = worker.probe.step if worker.probe is not None else 0
        worker.even = abs(paged - worker.paged - step + (worker.step or 0)) <= 1
        worker.step, worker.paged = step, paged

    async def _listen(self) -> None:
        """A rank that gives no sign of life is stopped, or holds Python's lock for good: the others wait for it."""
        while True:
            await asyncio.sleep(1.0)
            limit = self._stage.plan.recovery.worker_timeout
            for name, worker in self.living:
                if worker.seat.rank in self.debugged:
                    worker.heard = worker.heard and time.monotonic()
                silent = time.monotonic() - worker.heard
                if worker.heard and not worker.finished and silent > limit:
                    worker.heard = 0.0
                    how = f"{linux.state(worker.pid)}{_last_seen(worker)}"
                    self._stage.note(f"rank {worker.seat.rank} is silent for {silent:.0f} s ({how}): SIGKILL")
                    self.tell(name, signal.SIGKILL)

    def _with(self, pid: int) -> Worker | None:
        return next((worker for _, worker in self.living if worker.pid == pid), None)

    # -- afterwards

    def autopsy(self, kills: str) -> tuple[list[root_cause.ProcessFailure], str]:
        """All who failed, and what to tell about the first. `kills`: what the kernel says about memory."""
        deaths = [self.death(worker, kills) for worker in self.failed]
        death = root_cause.first_cause(deaths)
        if death is None:
            return deaths, ""
        worker = next(worker for worker in self.failed if worker.seat.rank == death.rank)
        tail = [line for line in self.output.tail(death.rank, "stdout", 5) if line.strip()]
        here = {one.seat.rank for one in self.workers.values()}
        well = {one.seat.rank for one in self.workers.values() if one.code == 0 and one.ended <= death.time}
        left = sorted(well | (here & root_cause.lost(death)))
        told = {one.seat.rank: one.differs for one in self.workers.values() if one.differs is not None}
        means = mismatch.words(told) if root_cause.differs(death) else ()
        return deaths, root_cause.block(death, tail=tail, folder=worker.folder, left=left, means=means)

    def death(self, worker: Worker, kills: str = "") -> root_cause.ProcessFailure:
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
            stop_sent=worker.told,
            blame=worker.blame,
        )


def _last_seen(worker: Worker) -> str:
    """Where its main thread was, as far as it has shown."""
    place = worker.probe.page.text.get("place") if worker.probe is not None else None
    return f", last seen at {os.path.basename(place[0])}:{place[1]} in {place[2]}" if place else ""
