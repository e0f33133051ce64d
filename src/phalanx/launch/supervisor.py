"""Holds a node's workers from birth to the end: starts, listens, stops, and tells why.

It never imports torch. Everything it waits for is an event of the loop: a message from the zygote, output, a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.cluster.placement import Seat
from phalanx.contract import events
from phalanx.errors import LaunchError
from phalanx.launch import cause, memory, zygotes
from phalanx.launch.console import Console
from phalanx.launch.lessons import Lesson
from phalanx.launch.output import Output
from phalanx.launch.plan import Plan
from phalanx.launch.runfolder import RunFolder
from phalanx.launch.zygote import kernel, wire
from phalanx.launch.zygote.leftovers import Leftovers
from phalanx.launch.zygotes import Zygote


@dataclass
class Worker:
    seat: Seat
    folder: str
    pid: int = 0
    code: int | None = None  # exit code, or minus the signal
    ended: float = 0.0
    stopped: bool = False  # it was told to stop before it ended


@dataclass
class Attempt:
    """One life of the group, from the first fork to the last exit."""

    number: int
    workers: dict[str, Worker]
    output: Output
    over: asyncio.Event = field(default_factory=asyncio.Event)
    store_started: bool = False

    @property
    def living(self) -> list[tuple[str, Worker]]:
        return [(name, worker) for name, worker in self.workers.items() if worker.code is None]

    @property
    def failed(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.code]


class Supervisor:
    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        zygote: Zygote,
        console: Console,
        listener: socket.socket,
        lesson: Lesson | None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._zygote = zygote
        self._console = console
        self._listener = listener
        self._lesson = lesson
        self._port: int = listener.getsockname()[1]
        self._attempt: Attempt | None = None
        self._ready: asyncio.Future[wire.Message] | None = None
        self._closing = False
        self._sweeping: asyncio.Event | None = None
        self._signal: signal.Signals | None = None  # the one that ended the run
        self._lost_zygote = ""
        self._escalation: asyncio.Task[None] | None = None
        self._kills = memory.read()
        self._leftovers = Leftovers()

    async def run(self) -> int:
        """Until every process of the run is gone. Returns the exit code."""
        loop = asyncio.get_running_loop()
        kernel.adopt_orphans()
        with self._signals(loop):
            try:
                if await self._zygote_ready(loop):
                    return await self._attempts()
                return self._interrupted()
            finally:
                await self._close(loop)

    # -- the zygote

    async def _zygote_ready(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Wait for its imports. False if a signal came first."""
        report = await self._listen(loop)
        if report.get("failed"):
            report = await self._import_failed(loop, report)
        if report.get("unsafe"):
            report = await self._start_fresh(loop, report["unsafe"])
        if self._signal is not None or not report:
            return False
        self._zygote.pid = report["pid"]
        self._folder.event(
            events.ZygoteReady(
                time=time.time(),
                pid=report["pid"],
                way=self._zygote.way,
                seconds=round(sum(report["seconds"].values()), 3),
                imports={name: took for name, took in report["seconds"].items() if took >= 0.01},
            )
        )
        return True

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> wire.Message:
        self._ready = loop.create_future()
        loop.add_reader(self._zygote.sock.fileno(), self._heard)
        if self._zygote.ready is not None:
            self._resolve(self._zygote.ready)
        return await self._ready

    def _heard(self) -> None:
        message = self._zygote.hear()
        if message is None:
            self._zygote_gone()
            return
        match message["is"]:
            case "ready":
                self._resolve(message)
            case "born":
                self._born(message)
            case "exited":
                self._exited(message)
            case "swept" if self._sweeping is not None:
                self._sweeping.set()
            case "ended":
                self._closing = True

    def _resolve(self, message: wire.Message) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(message)

    def _zygote_gone(self) -> None:
        """The connection has ended. Workers die with their zygote; what they had started comes to us."""
        asyncio.get_running_loop().remove_reader(self._zygote.sock.fileno())
        code = self._zygote.gone()
        if not self._closing:
            self._lost_zygote = "unknown" if code is None else cause.in_words(code)
        self._resolve({})
        if self._sweeping is not None:
            self._sweeping.set()
        if self._attempt is not None:
            for worker in self._attempt.workers.values():
                if worker.code is None:
                    worker.code, worker.stopped, worker.ended = -signal.SIGKILL, True, time.time()
            self._attempt.over.set()

    async def _import_failed(self, loop: asyncio.AbstractEventLoop, report: wire.Message) -> wire.Message:
        """A module that the user named must be there; torch itself the script may not need."""
        asked = {name: why for name, why in report["failed"].items() if name in self._plan.start.preload}
        if asked:
            name, why = next(iter(asked.items()))
            raise LaunchError(
                f"--preload {name} cannot be imported: {why}",
                details=[f"what imports printed: {self._folder.path}/zygote.log"],
                fix=f"{self._plan.command.python} -c 'import {name}' shows the same; leave it out of --preload",
            )
        name, why = next(iter(report["failed"].items()))
        return await self._start_fresh(loop, f"{name} cannot be imported there ({why})")

    async def _start_fresh(self, loop: asyncio.AbstractEventLoop, reason: str) -> wire.Message:
        """Forking is not safe after these imports: every rank gets an interpreter of its own."""
        self._folder.event(events.ZygoteRefused(time=time.time(), reason=reason))
        if self._lesson is not None and self._lesson.modules:
            self._lesson.refuse()
        self._note(f"{reason}, so every rank gets an interpreter of its own (as with --fresh)")
        await self._end_zygote(loop)
        if self._signal is not None:
            return {}
        self._closing, self._lesson = False, None
        with open(f"{self._folder.path}/zygote.log", "ab") as log:
            self._zygote = zygotes.fresh(self._plan.environ, log=log.fileno())
        return await self._listen(loop)

    async def _swept(self) -> None:
        """Everything below the zygote is gone."""
        self._sweeping = asyncio.Event()
        with contextlib.suppress(OSError):
            self._zygote.order({"do": "sweep"})
            await self._sweeping.wait()

    async def _end_zygote(self, loop: asyncio.AbstractEventLoop) -> None:
        """It ends everything below itself first. If it does not answer, it is killed, and we end the rest."""
        zygote = self._zygote
        self._closing = True
        if zygote.sock.fileno() < 0:
            return
        loop.remove_reader(zygote.sock.fileno())
        with contextlib.suppress(OSError):
            zygote.order({"do": "end"})
        with contextlib.suppress(OSError):
            await asyncio.wait_for(loop.run_in_executor(None, _until_closed, zygote.sock), timeout=15)
        if zygote.process is not None and zygote.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                zygote.process.wait(timeout=1)
            zygote.process.kill()
        zygote.gone()

    # -- attempts

    async def _attempts(self) -> int:
        for number in range(self._plan.max_restarts + 1):
            attempt = await self._live(number)
            code = await self._conclude(attempt, last=number == self._plan.max_restarts)
            if code is not None:
                return code
        raise AssertionError("the last attempt always concludes")

    async def _live(self, number: int) -> Attempt:
        loop = asyncio.get_running_loop()
        attempt = Attempt(number, {}, Output(loop, self._console))
        self._attempt = attempt
        self._folder.event(events.AttemptStarted(time=time.time(), attempt=number))
        self._duplicate(attempt)
        self._prepare_store(loop)
        for seat in self._plan.seats:
            self._start_worker(attempt, seat)
            await asyncio.sleep(0)  # hear what has been born, and signals
            if self._signal is not None or attempt.over.is_set():
                break
        if not attempt.living:
            attempt.over.set()
        await attempt.over.wait()
        return attempt

    def _duplicate(self, attempt: Attempt) -> None:
        """torchrun's --duplicate-stdout-filters: chosen lines of all ranks once more, in one file."""
        showing = self._plan.showing
        if not showing.stdout_needles and not showing.stderr_needles:
            return
        folder = self._folder.attempt_folder(attempt.number)
        os.makedirs(folder, exist_ok=True)
        role = self._plan.role
        attempt.output.duplicate(
            folder,
            stdout=showing.stdout_needles,
            stderr=showing.stderr_needles,
            teed=showing.duplicated,
            headers=showing.prefixes or {seat.rank: f"[{role}{seat.local_rank}]:" for seat in self._plan.seats},
        )

    def _prepare_store(self, loop: asyncio.AbstractEventLoop) -> None:
        """Where torch is imported already a store costs a fork, so it is there before anybody asks. Elsewhere it
        costs an import, so it is started by the first connection: many programs never make one."""
        if self._zygote.forks:
            self._start_store()
        else:
            loop.add_reader(self._listener.fileno(), self._start_store)

    def _start_store(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._attempt is None or self._attempt.store_started or self._closing:
            return
        self._attempt.store_started = True
        plan = self._plan
        order = zygotes.store_order(self._zygote, plan.command.python, plan.environ, plan.master_addr, self._port)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = os.open(f"{self._folder.path}/store.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._zygote.order(order, [nowhere, log, log, self._listener.fileno()])
        os.close(nowhere)
        os.close(log)

    def _start_worker(self, attempt: Attempt, seat: Seat) -> None:
        plan = self._plan
        folder = self._folder.rank_folder(attempt.number, seat.rank)
        environ = plan.environment(
            seat, attempt=attempt.number, folder=self._folder.path, rank_folder=folder, port=self._port
        )
        order: wire.Message = {
            "do": "start",
            "name": str(seat.rank),
            "environ": environ,
            "cores": list(seat.slot.cores),
            "command": plan.command.line(seat.local_rank),
        }
        if self._zygote.forks:
            order["args"] = plan.command.arguments(seat.local_rank)
            if plan.command.kind == "path":
                order["args"].insert(0, plan.command.target)
            if seat.rank == 0 and self._lesson is not None:
                order["lesson"] = self._lesson.path
        else:
            order["exec"] = order["command"]
        if self._zygote.way == "warm":
            order |= {"cwd": os.getcwd(), "umask": _umask(), "main": [plan.command.kind, plan.command.target]}
        show = plan.showing.shown[seat.rank]
        out, err = attempt.output.open(seat.rank, folder, show=show, terminal=seat.rank == 0)
        stdin = self._stdin(seat.rank)
        attempt.workers[order["name"]] = Worker(seat, folder)
        try:
            self._zygote.order(order, [stdin, out, err])
        except OSError:
            attempt.workers.pop(order["name"])  # the zygote is gone: its reader says so
        os.close(stdin)
        attempt.output.handed_over(seat.rank)

    def _stdin(self, rank: int) -> int:
        """Ours for one rank, and only while the terminal is ours to read from; nothing for the others."""
        if rank == self._plan.stdin_rank:
            with contextlib.suppress(OSError):
                if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                    return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _born(self, message: wire.Message) -> None:
        if self._attempt is None or message["name"] not in self._attempt.workers:
            return
        worker = self._attempt.workers[message["name"]]
        worker.pid = message["pid"]
        self._leftovers.note(worker.pid)
        self._folder.event(
            events.WorkerBorn(
                time=time.time(),
                rank=worker.seat.rank,
                pid=worker.pid,
                device=str(worker.seat.slot.device or ""),
                attempt=self._attempt.number,
            )
        )
        if self._signal is not None:
            self._tell(message["name"], self._signal)

    def _exited(self, message: wire.Message) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if message["name"] == "store":
            self._store_exited(message, attempt)
            return
        worker = attempt.workers[message["name"]]
        worker.code = os.waitstatus_to_exitcode(message["status"])
        worker.ended = time.time()
        self._folder.event(
            events.WorkerExited(
                time=worker.ended,
                rank=worker.seat.rank,
                pid=message["pid"],
                code=worker.code,
                peak_memory=message["peak"],
                attempt=attempt.number,
            )
        )
        if not attempt.living:
            attempt.over.set()
        elif worker.code != 0 and not worker.stopped:
            self._stop(signal.SIGTERM, f"rank {worker.seat.rank} failed", self._plan.ending.failure_grace)

    def _store_exited(self, message: wire.Message, attempt: Attempt) -> None:
        """Without its store a group cannot form, nor grow; what has formed goes on by itself."""
        if self._closing or not attempt.living:
            return
        code = os.waitstatus_to_exitcode(message["status"])
        self._folder.event(events.StoreLost(time=time.time(), code=code))
        self._note(f"the store process ended ({cause.in_words(code)}); a new one takes its place, empty")
        attempt.store_started = False
        self._start_store()

    def _note(self, text: str) -> None:
        """Something the user may want to know; what ends a run is said even with --quiet."""
        self._folder.event(events.Note(time=time.time(), text=text))
        if not self._plan.showing.quiet:
            self._console.say(text)

    # -- the end

    def _stop(self, number: signal.Signals, reason: str, grace: float) -> None:
        """Tell the living to stop; those that do not, are stopped."""
        attempt = self._attempt
        if attempt is None:
            return
        self._folder.event(events.Stopping(time=time.time(), reason=reason, signal=number.name))
        for name, worker in attempt.living:
            worker.stopped = True
            self._tell(name, number)
        if self._escalation is None or self._escalation.done():
            self._escalation = asyncio.get_running_loop().create_task(self._escalate(attempt, number, grace))

    async def _escalate(self, attempt: Attempt, number: signal.Signals, grace: float) -> None:
        """A worker inside native code never gets to its handler for SIGINT; one may ignore SIGTERM; none SIGKILL."""
        steps = [(signal.SIGKILL, grace)]
        if number != signal.SIGTERM:
            steps = [(signal.SIGTERM, grace / 3), (signal.SIGKILL, grace * 2 / 3)]
        for next_signal, wait in steps:
            await asyncio.sleep(wait)
            for name, worker in attempt.living:
                self._note(f"rank {worker.seat.rank} has not stopped after {wait:.0f} s: {next_signal.name}")
                self._tell(name, next_signal)

    def _tell(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            self._zygote.order({"do": "signal", "name": name, "signal": int(number)})

    async def _conclude(self, attempt: Attempt, *, last: bool) -> int | None:
        """The attempt is over: say why. None: there is another one."""
        if self._escalation is not None:
            self._escalation.cancel()
        over = self._signal is not None or bool(self._lost_zygote) or not attempt.failed
        if over or last:
            await self._close(asyncio.get_running_loop())
        else:
            # Also the store: the next attempt gets an empty one on the same port, and reads no key of a dead rank.
            self._attempt = None
            await self._swept()
        await attempt.output.drained(2.0)
        try:
            return self._verdict(attempt, over=over, last=last)
        finally:
            attempt.output.close()

    def _verdict(self, attempt: Attempt, *, over: bool, last: bool) -> int | None:
        if self._signal is not None:
            return self._interrupted()
        if self._lost_zygote:
            self._console.say(f"the zygote was ended from outside: {self._lost_zygote}; its workers ended with it")
            return 128 + signal.SIGKILL
        if over:
            return 0
        death = cause.first_cause([self._death(attempt, worker) for worker in attempt.failed])
        if death is None:
            return 1
        self._folder.event(
            events.WorkerFailed(
                time=time.time(),
                rank=death.rank,
                summary=cause.summary(death),
                code=death.exit_code,
                attempt=attempt.number,
            )
        )
        also = sum(1 for worker in attempt.failed if not worker.stopped and worker.seat.rank != death.rank)
        worker = next(worker for worker in attempt.failed if worker.seat.rank == death.rank)
        tail = [line for line in attempt.output.tail(death.rank, "stdout", 5) if line.strip()]
        self._console.say(cause.block(death, tail=tail, folder=worker.folder, also=also))
        if last:
            return death.exit_code
        self._note(f"starting all ranks again: restart {attempt.number + 1} of {self._plan.max_restarts}")
        return None

    def _death(self, attempt: Attempt, worker: Worker) -> cause.Death:
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
            stderr=attempt.output.tail(worker.seat.rank, "stderr", 60),
            memory=memory.read().since(self._kills) if code == -signal.SIGKILL else "",
        )

    def _interrupted(self) -> int:
        if self._signal is None:
            words = self._lost_zygote or "unknown"
            raise LaunchError(
                f"the interpreter that was to import torch ended early: {words}",
                details=[f"what it printed: {self._folder.path}/zygote.log"],
                fix="phalanx run --fresh … starts every rank by itself",
            )
        return 128 + self._signal

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing of the run is alive afterwards."""
        loop.remove_reader(self._listener.fileno())
        await self._end_zygote(loop)
        if self._zygote.process is not None:
            await loop.run_in_executor(None, self._leftovers.end)

    # -- signals

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        handled = {*self._plan.ending.signals, signal.SIGINT}
        for number in handled:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGWINCH, self._resized)
        try:
            yield
        finally:
            for number in (*handled, signal.SIGWINCH):
                loop.remove_signal_handler(number)

    def _signalled(self, number: signal.Signals) -> None:
        again = self._signal is not None
        self._signal = self._signal or number
        attempt = self._attempt
        if attempt is None:
            self._resolve({})
        elif again and number == signal.SIGINT:
            self._note("ending at once")
            self._console.abandon()
            for name, _ in attempt.living:
                self._tell(name, signal.SIGKILL)
        elif not again:
            if number == signal.SIGINT:
                self._note("stopping; Ctrl-C again ends at once")
            self._stop(number, f"{number.name} received", self._plan.ending.grace)

    def _resized(self) -> None:
        if self._attempt is not None:
            self._attempt.output.resized()
            self._tell("0", signal.SIGWINCH)


def _until_closed(sock: socket.socket) -> None:
    while wire.receive(sock) is not None:
        pass


def _umask() -> int:
    """The only way to read it is to set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
