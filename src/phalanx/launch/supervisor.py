"""Holds a node's workers from birth to the end: starts, listens, stops, and tells why.

It never imports torch. Everything it waits for is an event of the loop: a message from the zygote, output, a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

from phalanx.contract import events
from phalanx.errors import LaunchError
from phalanx.launch import cause, memory, zygotes
from phalanx.launch.attempt import Attempt, Stage
from phalanx.launch.console import Console
from phalanx.launch.lessons import Lesson
from phalanx.launch.plan import Plan
from phalanx.launch.runfolder import RunFolder
from phalanx.launch.zygote import kernel, wire
from phalanx.launch.zygote.leftovers import Leftovers
from phalanx.launch.zygotes import Zygote

_PATIENCE = 15.0  # for a zygote that has been told to end: it gives what it ends a second, and then kills


class Supervisor:
    def __init__(
        self,
        plan: Plan,
        *,
        folder: RunFolder,
        console: Console,
        zygote: Zygote,
        lesson: Lesson | None,
        listener: socket.socket,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._console = console
        self._zygote = zygote
        self._lesson = lesson
        self._stage = Stage(plan, folder, console, listener, self._note)
        self._attempt: Attempt | None = None
        self._ready: asyncio.Future[wire.Message] | None = None
        self._sweeping: asyncio.Event | None = None
        self._closing = False
        self._showing_rest = False  # everything is over but for output that the terminal has not taken yet
        self._signal: signal.Signals | None = None  # the one that ended the run
        self._lost_zygote = ""  # how it ended, if it did so by itself
        self._kills = memory.read()
        self._leftovers = Leftovers()

    async def run(self) -> int:
        """Until every process of the run is gone. Returns the exit code."""
        kernel.adopt_orphans()
        with self._signals():
            try:
                if await self._zygote_ready():
                    return await self._attempts()
                return self._never_started()
            finally:
                await self._close()
                self._showing_rest = True
                await asyncio.to_thread(self._console.close)

    def _note(self, text: str) -> None:
        """Something the user may want to know; what ends a run is said even with --quiet."""
        self._folder.event(events.Note(time=time.time(), text=text))
        if not self._plan.showing.quiet:
            self._console.say(text)

    # -- the zygote

    async def _zygote_ready(self) -> bool:
        """Wait for its imports. False if it never comes to that."""
        report = await self._listen()
        if report.get("failed"):
            report = await self._import_failed(report)
        if report.get("unsafe"):
            report = await self._start_fresh(report["unsafe"])
        if self._signal is not None or not report:
            return False
        self._show_import_output()
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

    async def _listen(self) -> wire.Message:
        loop = asyncio.get_running_loop()
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
            case "born" if self._attempt is not None:
                self._leftovers.note(message["pid"])
                self._attempt.born(message["name"], message["pid"])
                if self._signal is not None:
                    self._attempt.tell(message["name"], self._signal)
            case "exited" if self._attempt is not None:
                self._attempt.exited(message)
            case "refused" if self._attempt is not None:
                self._attempt.refused(message["name"], message["why"])
            case "swept" if self._sweeping is not None:
                self._sweeping.set()

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
            self._attempt.lost()

    async def _import_failed(self, report: wire.Message) -> wire.Message:
        """A module that the user named must be there; torch itself the script may not need."""
        for name, why in report["failed"].items():
            if name in self._plan.start.preload:
                raise LaunchError(
                    f"--preload {name} cannot be imported: {why}",
                    details=[f"what imports printed: {self._folder.path}/zygote.log"],
                    fix=f"{self._plan.command.python} -c 'import {name}' shows the same; leave it out of --preload",
                )
        name, why = next(iter(report["failed"].items()))
        return await self._start_fresh(f"{name} cannot be imported there ({why})")

    async def _start_fresh(self, reason: str) -> wire.Message:
        """Forking is not safe after these imports: every rank gets an interpreter of its own."""
        self._folder.event(events.ZygoteRefused(time=time.time(), reason=reason))
        if self._lesson is not None and self._lesson.modules:
            self._lesson.refuse()
        self._note(f"{reason}, so every rank gets an interpreter of its own (as with --fresh)")
        await self._end_zygote()
        if self._signal is not None:
            return {}
        self._closing, self._lesson = False, None
        with open(f"{self._folder.path}/zygote.log", "ab") as log:
            self._zygote = zygotes.fresh(self._plan.environ, log=log.fileno())
        return await self._listen()

    def _show_import_output(self) -> None:
        """Warnings of imports, which fresh interpreters would each have printed."""
        with contextlib.suppress(OSError), open(f"{self._folder.path}/zygote.log", errors="replace") as file:
            text = file.read(4096).strip()
            if text:
                self._note("while importing:\n" + "\n".join(f"  {line}" for line in text.splitlines()))

    async def _swept(self) -> None:
        """Everything below the zygote is gone."""
        self._sweeping = asyncio.Event()
        with contextlib.suppress(OSError):
            self._zygote.order({"do": "sweep"})
            await self._sweeping.wait()

    async def _end_zygote(self) -> None:
        """It ends everything below itself first. If it does not answer, it is killed, and we end the rest."""
        zygote = self._zygote
        self._closing = True
        if zygote.sock.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(zygote.sock.fileno())
        with contextlib.suppress(OSError):
            zygote.order({"do": "end"})
        with contextlib.suppress(OSError):
            try:
                await asyncio.wait_for(loop.run_in_executor(None, _until_closed, zygote.sock), timeout=_PATIENCE)
            finally:
                zygote.sock.shutdown(socket.SHUT_RDWR)  # or the thread would wait for ever, and we for it
        if zygote.process is not None and zygote.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                zygote.process.wait(timeout=1)
            zygote.process.kill()
        zygote.gone()

    async def _close(self) -> None:
        """Nothing of the run is alive afterwards."""
        await self._end_zygote()
        if self._zygote.process is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._leftovers.end)

    # -- attempts

    async def _attempts(self) -> int:
        for number in range(self._plan.max_restarts + 1):
            attempt = await self._live(number)
            code = await self._conclude(attempt, last=number == self._plan.max_restarts)
            if code is not None:
                return code
        raise AssertionError("the last attempt always concludes")

    async def _live(self, number: int) -> Attempt:
        attempt = self._attempt = Attempt(number, self._stage, self._zygote, self._lesson)
        attempt.prepare_store()
        for seat in self._plan.seats:
            attempt.start_worker(seat)
            await asyncio.sleep(0)  # hear what has been born, and signals
            if self._signal is not None or attempt.over.is_set():
                break
        if not attempt.living:
            attempt.over.set()
        await attempt.over.wait()
        return attempt

    async def _conclude(self, attempt: Attempt, *, last: bool) -> int | None:
        """The attempt is over: say why. None: there is another one."""
        attempt.concluded()
        over = self._signal is not None or bool(self._lost_zygote) or not attempt.failed
        if over or last:
            await self._close()
        else:
            # Also the store: the next attempt gets an empty one on the same port, and reads no key of a dead rank.
            self._attempt = None
            await self._swept()
        await attempt.output.drained(2.0)
        try:
            if over:
                return self._peaceful_end()
            return self._tell_failure(attempt, last=last)
        finally:
            attempt.output.close()

    def _peaceful_end(self) -> int:
        if self._signal is not None:
            return 128 + self._signal
        if self._lost_zygote:
            self._console.say(f"the zygote was ended from outside: {self._lost_zygote}; its workers ended with it")
            return 128 + signal.SIGKILL
        return 0

    def _tell_failure(self, attempt: Attempt, *, last: bool) -> int | None:
        found = attempt.first_cause(memory.read().since(self._kills))
        if found is None:
            return 1
        death, text = found
        self._folder.event(
            events.WorkerFailed(
                time=time.time(),
                rank=death.rank,
                summary=cause.summary(death),
                code=death.exit_code,
                attempt=attempt.number,
            )
        )
        self._console.say(text)
        if last:
            return death.exit_code
        self._note(f"starting all ranks again: restart {attempt.number + 1} of {self._plan.max_restarts}")
        return None

    def _never_started(self) -> int:
        if self._signal is not None:
            return 128 + self._signal
        raise LaunchError(
            f"the interpreter that was to import torch ended early: {self._lost_zygote or 'unknown'}",
            details=[f"what it printed: {self._folder.path}/zygote.log"],
            fix="phalanx run --fresh … starts every rank by itself",
        )

    # -- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = {*self._plan.ending.signals, signal.SIGINT}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            handled.discard(signal.SIGHUP)  # nohup: the user has said that a lost terminal is no reason to stop
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
        if self._showing_rest:
            self._console.abandon()
        elif attempt is None:
            self._resolve({})
        elif again and number == signal.SIGINT:
            self._note("ending at once")
            self._console.abandon()
            attempt.kill()
        elif not again:
            if number == signal.SIGINT:
                self._note("stopping; Ctrl-C again ends at once")
            attempt.stop(number, f"{number.name} received", self._plan.ending.grace)

    def _resized(self) -> None:
        if self._attempt is not None:
            for rank in self._attempt.output.resized():
                self._attempt.tell(str(rank), signal.SIGWINCH)


def _until_closed(sock: socket.socket) -> None:
    while wire.receive(sock) is not None:
        pass
