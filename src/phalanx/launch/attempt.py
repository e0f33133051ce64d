"""One life of the group, from the first fork to the last exit: its workers, its store, its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cluster.placement import Seat
from phalanx.contract import events
from phalanx.contract import line as words
from phalanx.launch import cause, zygotes
from phalanx.launch.console import Console
from phalanx.launch.lessons import Lesson
from phalanx.launch.line import Line
from phalanx.launch.output import Output
from phalanx.launch.plan import Plan
from phalanx.launch.relay import Relay
from phalanx.launch.runfolder import RunFolder
from phalanx.launch.zygote import kernel, wire
from phalanx.launch.zygotes import Zygote

_MOST_STORES = 3  # that are replaced in one attempt: one that cannot start would be replaced for ever


@dataclass
class Worker:
    seat: Seat
    folder: str
    pid: int = 0
    born: float = 0.0  # by a clock that nobody sets
    code: int | None = None  # exit code, or minus the signal
    ended: float = 0.0  # by the clock on the wall, which error files go by
    stopped: bool = False  # it was told to stop before it ended
    step: int | None = None  # committed, as far as it has told
    heard: float = 0.0  # when it last gave a sign of life; 0: it is none that does
    done: bool = False  # its training has come to its end
    formed: int = -1  # the last generation that it has committed a step of, as far as it has told


@dataclass(frozen=True)
class Fall:
    """A worker has failed: what is known at that moment."""

    rank: int
    reason: str
    place: str  # what crashed, and where; empty: it was killed from outside
    time: float
    lived: float
    step: int | None  # the newest that any worker here has committed
    everybody: bool = False  # nobody is left who could hand anything over


@dataclass(frozen=True)
class Stage:
    """What all attempts of a run share."""

    plan: Plan
    folder: RunFolder
    console: Console
    listener: socket.socket | None  # the store's, bound once: an attempt's store is new, its address is not
    note: Callable[[str], None]
    failing: Callable[[Fall], None]  # a worker has failed here: somebody decides what comes of it
    able: Callable[[bool, bool], None]  # workers here have called that can regroup; some are through with their work
    going: Callable[[words.Going], None]  # the first step of a group that has formed anew is committed
    relay: Relay | None = None  # who else reads what workers write
    echo: bool = True  # it is shown here


class Attempt:
    def __init__(self, number: int, stage: Stage, zygote: Zygote, lesson: Lesson | None) -> None:
        self.number = number
        self.workers: dict[str, Worker] = {}
        self.output = Output(asyncio.get_running_loop(), stage.console, relay=stage.relay, echo=stage.echo)
        self.over = asyncio.Event()
        self.generation = 0
        self._why = ""  # this generation is not the first
        self._line = Line(self)
        self._listening: asyncio.Task[None] | None = None
        self._called = False  # a worker that can regroup
        self._able = (False, False)  # as it was told
        self._stage = stage
        self._zygote = zygote
        self._lesson = lesson
        self._store_started = False
        self._stores_lost = 0
        self._escalation: asyncio.Task[None] | None = None
        stage.folder.event(events.AttemptStarted(time=time.time(), attempt=number))
        self._duplicate()

    @property
    def living(self) -> list[tuple[str, Worker]]:
        return [(name, worker) for name, worker in self.workers.items() if worker.code is None]

    @property
    def full(self) -> bool:
        """Every seat is taken, by a worker that is alive."""
        return len(self.living) == len(self._stage.plan.seats)

    @property
    def silence(self) -> float:
        """Seconds after which a rank that is silent is lost."""
        return self._stage.plan.silence

    @property
    def formed(self) -> bool:
        """Every rank of this node has committed a step of this generation."""
        return all(worker.formed == self.generation for worker in self.workers.values())

    @property
    def stopping(self) -> bool:
        return self._escalation is not None

    @property
    def failed(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.code]

    def _tell_able(self) -> None:
        """One that has not called yet is told where it stands when it does; a plain script never calls."""
        ended = any(worker.done or worker.code == 0 for worker in self.workers.values())
        if (self._called, ended) != self._able:
            self._able = (self._called, ended)
            self._stage.able(*self._able)

    def _duplicate(self) -> None:
        """torchrun's --duplicate-stdout-filters: chosen lines of all ranks once more, in one file."""
        plan = self._stage.plan
        showing = plan.showing
        if not showing.stdout_needles and not showing.stderr_needles:
            return
        folder = self._stage.folder.attempt_folder(self.number)
        os.makedirs(folder, exist_ok=True)
        self.output.duplicate(
            folder,
            stdout=showing.stdout_needles,
            stderr=showing.stderr_needles,
            teed={seat.rank: showing.duplicated(seat) for seat in plan.seats},
            headers={
                seat.rank: showing.prefix(seat, os.uname().nodename) or f"[{plan.role}{seat.local_rank}]:"
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
        if self._zygote.forks:
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
        self._store_started = True
        plan, path = self._stage.plan, self._stage.folder.path
        order = zygotes.store_order(self._zygote, plan, plan.master_port)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = os.open(f"{path}/store.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            self._zygote.order(order, [nowhere, log, log, listener.fileno()])
        os.close(nowhere)
        os.close(log)

    def start_worker(self, seat: Seat) -> None:
        plan, run_folder = self._stage.plan, self._stage.folder
        folder = run_folder.rank_folder(self.number, seat.rank)
        environ = plan.environment(
            seat,
            attempt=self.number,
            run=run_folder.name,
            folder=run_folder.path,
            rank_folder=folder,
            port=plan.master_port,
            line=self._line.name,
        )
        order = zygotes.worker_order(self._zygote, plan.command, seat, environ)
        if seat.rank == 0 and self._lesson is not None:
            order["lesson"] = self._lesson.path
        out, err = self.output.open(seat.rank, folder, show=plan.showing.shown(seat), terminal=seat.rank == 0)
        stdin = self._stdin(seat.rank)
        self.workers[order["name"]] = Worker(seat, folder, born=time.monotonic())
        try:
            self._zygote.order(order, [stdin, out, err])
        except OSError:
            del self.workers[order["name"]]  # the zygote is gone: its reader says so
        os.close(stdin)
        self.output.handed_over(seat.rank)

    def _stdin(self, rank: int) -> int:
        """Ours for one rank, and only while the terminal is ours to read from; nothing for the others."""
        if rank == self._stage.plan.stdin_rank:
            with contextlib.suppress(OSError):
                if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                    return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def born(self, name: str, pid: int) -> None:
        if name not in self.workers:
            return
        worker = self.workers[name]
        worker.pid = pid
        self._stage.folder.event(
            events.WorkerBorn(
                time=time.time(),
                rank=worker.seat.rank,
                pid=pid,
                device=str(worker.seat.slot.device or ""),
                attempt=self.number,
            )
        )

    # -- death

    def exited(self, message: wire.Message) -> None:
        code = os.waitstatus_to_exitcode(message["status"])
        if message["name"] == "store":
            self._store_exited(code)
            return
        worker = self.workers[message["name"]]
        worker.code, worker.ended = code, time.time()
        self._stage.folder.event(
            events.WorkerExited(
                time=worker.ended,
                rank=worker.seat.rank,
                pid=message["pid"],
                code=code,
                peak_memory=message["peak"],
                attempt=self.number,
            )
        )
        if code == 0:
            self._tell_able()
        elif not worker.stopped:
            self._stage.failing(self.fall(f"rank {worker.seat.rank} failed", worker))
            if not self.stopping:
                return  # whoever decides about it has them regroup, or stops what is left
        if not self.living:
            self.over.set()

    def fall(self, reason: str, worker: Worker | None = None, place: str = "") -> Fall:
        """Of one worker, or of all of them at once."""
        workers = [worker] if worker is not None else list(self.workers.values())
        steps = [other.step for other in self.workers.values() if other.step is not None]
        return Fall(
            rank=min((fallen.seat.rank for fallen in workers), default=0),
            reason=reason,
            place=cause.place(self._death(worker, "")) if worker is not None else place,
            time=time.time(),
            lived=time.monotonic() - min((fallen.born for fallen in workers), default=time.monotonic()),
            step=max(steps, default=None),
            everybody=worker is None and not self.living,
        )

    def refused(self, name: str, why: str) -> None:
        """A process that the kernel would not make."""
        self._stage.console.say(f"{'the store' if name == 'store' else f'rank {name}'} could not be started: {why}")
        if name in self.workers:
            self.exited({"name": name, "pid": 0, "status": 1 << 8, "peak": 0})

    def _store_exited(self, code: int) -> None:
        """Without its store a group cannot form, nor grow; what has formed goes on by itself."""
        if self.over.is_set() or not self.living:
            return
        self._stage.folder.event(events.StoreLost(time=time.time(), code=code))
        self._stores_lost += 1
        if self._stores_lost > _MOST_STORES:
            self._stage.note(f"the store process ends again and again; see {self._stage.folder.path}/store.log")
            return
        self._stage.note(f"the store process ended ({cause.in_words(code)}); a new one takes its place, empty")
        self._store_started = False
        self._start_store()
        if self._able == (True, False) and not self.formed:  # who had told the old one waits for ever
            self._stage.failing(self.fall("the store was ended while the group formed", place="store"))

    def lost(self) -> None:
        """The zygote is gone, and its workers with it."""
        for _, worker in self.living:
            worker.code, worker.stopped, worker.ended = -signal.SIGKILL, True, time.time()
        self._store_started = False

    def transplant(self, zygote: Zygote) -> None:
        """To another zygote: the old one is gone, and so are its store and its workers."""
        self._zygote = zygote
        self.prepare_store()

    def tell(self, name: str, number: signal.Signals, *, alone: bool = False) -> None:
        """To a worker and all it has started, or to it alone."""
        with contextlib.suppress(OSError):
            self._zygote.order({"do": "signal", "name": name, "signal": int(number), "alone": alone})

    def stop(self, number: signal.Signals, reason: str, grace: float, *, told: bool = False) -> None:
        """Tell the living to stop, unless they were told; those that do not, are stopped."""
        self._stage.folder.event(events.Stopping(time=time.time(), reason=reason, signal=number.name))
        for name, worker in self.living:
            worker.stopped = True
            if not told:
                self.tell(name, number)
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

    def kill(self) -> None:
        for name, _ in self.living:
            self.tell(name, signal.SIGKILL)

    def concluded(self) -> None:
        if self._stage.listener is not None:
            asyncio.get_running_loop().remove_reader(self._stage.listener.fileno())
        if self._escalation is not None:
            self._escalation.cancel()
        self._line.close()
        if self._listening is not None:
            self._listening.cancel()

    # -- a group that forms anew

    def regroup(self, generation: int, why: str) -> None:
        """The dead are replaced, and the living told."""
        self.generation, self._why = generation, why
        for seat in self._stage.plan.seats:
            worker = self.workers.get(str(seat.rank))
            if worker is None or worker.code is not None:
                with contextlib.suppress(OSError):  # of the one before
                    os.unlink(f"{self._stage.folder.rank_folder(self.number, seat.rank)}/error.json")
                self.start_worker(seat)
            else:
                self._line.send(worker.pid, self._world(seat))

    def _world(self, seat: Seat) -> words.World:
        plan = self._stage.plan
        return words.World(
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
        )

    def knows(self, pid: int) -> bool:
        return self._with(pid) is not None

    def said(self, pid: int, message: words.FromWorker) -> None:
        worker = self._with(pid)
        if worker is None:
            return
        worker.heard = time.monotonic()
        match message:
            case words.Here():
                self._line.send(pid, self._world(worker.seat))
                self._called = True
                self._tell_able()
                if self._listening is None:
                    self._listening = asyncio.get_running_loop().create_task(self._listen())
            case words.Beat():
                worker.step = message.step
            case words.Going():
                worker.step, worker.formed = message.step, message.generation
                self._stage.going(message)
            case words.Done():
                worker.done = True
                self._tell_able()

    async def _listen(self) -> None:
        """A rank that gives no sign of life is stopped, or holds Python's lock for good: the others wait for it."""
        while True:
            await asyncio.sleep(1.0)
            limit = self._stage.plan.silence
            for name, worker in self.living:
                silent = time.monotonic() - worker.heard
                if worker.heard and not worker.done and silent > limit:
                    worker.heard = 0.0
                    how = kernel.state(worker.pid)
                    self._stage.note(f"rank {worker.seat.rank} is silent for {silent:.0f} s ({how}): SIGKILL")
                    self.tell(name, signal.SIGKILL)

    def _with(self, pid: int) -> Worker | None:
        return next((worker for _, worker in self.living if worker.pid == pid), None)

    # -- afterwards

    def autopsy(self, kills: str) -> tuple[list[cause.Death], str]:
        """All who failed, and what to tell about the first. `kills`: what the kernel says about memory."""
        deaths = [self._death(worker, kills) for worker in self.failed]
        death = cause.first_cause(deaths)
        if death is None:
            return deaths, ""
        also = sum(1 for worker in self.failed if not worker.stopped and worker.seat.rank != death.rank)
        worker = next(worker for worker in self.failed if worker.seat.rank == death.rank)
        tail = [line for line in self.output.tail(death.rank, "stdout", 5) if line.strip()]
        return deaths, cause.block(death, tail=tail, folder=worker.folder, also=also)

    def _death(self, worker: Worker, kills: str) -> cause.Death:
        error = ""
        with contextlib.suppress(OSError), open(f"{worker.folder}/error.json", errors="replace") as file:
            error = file.read(1 << 20)
        code = worker.code or 0
        return cause.Death(
            rank=worker.seat.rank,
            code=code,
            time=worker.ended,
            stopped=worker.stopped,
            device=str(worker.seat.slot.device or ""),
            error=error,
            stderr=self.output.tail(worker.seat.rank, "stderr", 60),
            memory=kills if code == -signal.SIGKILL else "",
        )
