"""The agent of a node: it starts, watches and stops the workers, and reports why they ended.

It never imports torch, and waits only for events of its loop: messages of the fork server, output, signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from phalanx.contract import error_report, events, worker_messages
from phalanx.contract.variables import OFF, SNAPSHOT_EVERY
from phalanx.control import messages
from phalanx.diagnose.rules.timeouts import Timeout
from phalanx.errors import LaunchError, PhalanxError
from phalanx.forkserver import linux, wire
from phalanx.forkserver.orphans import Orphans
from phalanx.launcher.agent import out_of_memory
from phalanx.launcher.agent.linger import LingeringProcesses
from phalanx.launcher.agent.probes import StatusBoard
from phalanx.launcher.agent.signals import SAME, Signals
from phalanx.launcher.agent.snapshot_memory import SnapshotMemory
from phalanx.launcher.agent.watched import WatchContext
from phalanx.launcher.agent.worker import WorkerFailure
from phalanx.launcher.agent.worker_group import WorkerGroup, WorkerGroupContext
from phalanx.launcher.coordination.actions import (
    AcceptLoss,
    Action,
    EndRun,
    HaltWorkers,
    HoldWorkers,
    RegroupPlan,
    SignalWorkers,
    StopWorkers,
)
from phalanx.launcher.coordination.coordinator import AttemptReport, Coordinator, RunResult, StartAttempt
from phalanx.launcher.debug.sessions import DebugSessions
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.ipc.control_socket import ControlSocket
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.output.console import Console
from phalanx.launcher.output.filters import Std
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.viewers.dashboard import Dashboard
from phalanx.launcher.viewers.event_server import EventServer

if TYPE_CHECKING:  # imported later, by _import_watchers: they take as long as all the rest
    from phalanx.launcher.agent.exits import Exits
    from phalanx.launcher.hangs.detector import HangDetector
    from phalanx.launcher.telemetry.collector import Collector
    from phalanx.launcher.telemetry.node_sampler import NodeSampler
    from phalanx.launcher.telemetry.step_timings import StepTimings

_WATCH_DELAY = 0.5  # seconds from the start of the workers to that of the watchers
_WAITING_DELAY = 3.0  # seconds before the first line about what the run waits for
_WAITING_INTERVAL = 30.0  # seconds between two such lines, if there is no terminal
_END_TIMEOUT = 15.0  # seconds for a fork server to end: it kills its processes after one second


class RunHook(Protocol):
    """Takes part in a run beside the agent: the ssh session that started this node, or chaos, for example."""

    @property
    def pids(self) -> frozenset[int]:
        """Return the children of this process that the agent must not end."""
        ...

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        """Called before anything is started, with the sockets on which node 0 listens."""

    def begin(self, agent: NodeAgent) -> None:
        """Called when the agent's event loop runs."""

    async def end(self, code: int) -> None:
        """Called when the run is over and the coordinator closed."""

    def hurry(self) -> None:
        """Called when the user does not want to wait for other nodes to end."""


class NodeAgent:
    """Runs the workers of one node: `await NodeAgent(plan, ...).run()` returns the exit code."""

    def __init__(
        self,
        plan: Plan,
        *,
        folder: RunFolder,
        console: Console,
        fork_server: ForkServerClient,
        preload_hints: PreloadHints | None,
        coordinator: Coordinator,
        hook: RunHook | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._console = console
        self._fork_server = fork_server
        self._preload_hints = preload_hints
        self._coordinator = coordinator
        self._hook = hook
        self.all_joined = False  # every node has joined
        self._error: PhalanxError | None = None  # reported by `fail`
        self._joining: asyncio.Task[None] | None = None
        self._last_waiting_note = 0.0
        self._early_stop: StopWorkers | None = None  # a stop that came before the attempt began
        self._attempt: WorkerGroup | None = None
        self._ready: asyncio.Future[wire.Message] | None = None
        self._imported = False  # the fork server has finished its imports
        self._answer: asyncio.Future[wire.Message] | None = None  # of the fork server to a request
        self._lingering: LingeringProcesses | None = None  # set once the run has succeeded
        self._leave_orphans = False  # --linger forever: keep processes that ranks left running
        self._closing = False
        self._fork_server_ended = False  # on request, with all processes below it
        self._draining_output = False  # only output for a slow terminal is left
        self._signal: signal.Signals | None = None  # the one that ended the run
        self._preempting: float | None = None  # when a signal to this agent began a preemption
        self._lost_fork_server = ""  # how it ended, if it was killed and not replaced yet
        self._replacing: asyncio.Task[None] | None = None  # a killed fork server and its workers
        self._next_regroup: RegroupPlan | None = None  # the latest regroup
        self._kills = out_of_memory.read()
        self._orphans = Orphans()
        self._signals = Signals(plan)
        self._snapshot_memory: SnapshotMemory | None = None
        self._board: StatusBoard | None = None
        self._control_socket: ControlSocket | None = None
        self._event_server: EventServer | None = None
        self._dashboard = Dashboard(plan, folder, console)
        self._debugging: DebugSessions | None = None
        self._hang_detector: HangDetector | None = None
        self._watchers_start: asyncio.Task[None] | None = None
        self._step_timings: StepTimings | None = None
        self._collector: Collector | None = None
        self._sampler: NodeSampler | None = None  # reads the status slots for the three above
        self._exits: Exits | None = None  # watches workers whose script is over
        self.rpc = NodeRpc(coordinator)

    async def run(self) -> int:
        """Run until all processes of the run have ended, on all nodes. Returns the exit code."""
        linux.adopt_orphans()
        self._coordinator.attach(self)
        if self._hook is not None:
            self._hook.begin(self)
        every = self._plan.environ.get(SNAPSHOT_EVERY, "")
        if every not in OFF and (every or self._may_recover):
            self._snapshot_memory = SnapshotMemory(self._is_worker, requested=bool(every))
        self._board, self._control_socket = (
            StatusBoard(checks=self._plan.hang.check_collectives),
            ControlSocket(self._folder),
        )
        rendezvous = self._plan.rendezvous
        trusted = rendezvous is None or bool(rendezvous.token.key)
        self._debugging = DebugSessions(
            self, self._coordinator, self.rpc, console=self._console, folder=self._folder, trusted=trusted
        )
        self._control_socket.on("attach", self._debugging.attach)
        self._event_server = EventServer(
            WatchContext(self, self._coordinator, self.rpc, self._control_socket, self._folder)
        )
        code, text, began = 1, "", time.monotonic()
        with self._signals.installed(
            end=self._signal_received, preempt=self._preempted, forward=self._forward_signal, resized=self._resized
        ):
            try:
                self._dashboard.start(leads=self._coordinator.leads)
                await self._dashboard.screen(self.note)
                self.all_joined = await self._wait_until_ready()
                if self.all_joined:
                    code, text = await self._run_attempts()
                else:
                    code = self._never_started()
                return code
            except PhalanxError as error:
                code, text = error.exit_code, str(error)
                raise
            except OSError as error:  # a full disk, a limit: tell the other nodes
                text = f"this node cannot continue: {error}"
                raise LaunchError(text) from error
            finally:
                if self._watchers_start is not None:
                    self._watchers_start.cancel()
                for watcher in (self._sampler, self._hang_detector, self._collector, self._exits):
                    if watcher is not None:
                        await watcher.end()
                await self._close()
                self._event_server.end(code, time.monotonic() - began)
                await self._dashboard.end()
                for held in (
                    self._snapshot_memory,
                    self._debugging,
                    self._control_socket,
                    self._event_server,
                    self._board,
                ):
                    if held is not None:
                        held.close()
                self._draining_output = True
                self._console.waiting(None)
                await asyncio.to_thread(self._console.close)
                # Last: a scheduler may kill all tasks as soon as one has failed, and all output is written by now.
                await self._coordinator.close(code, text)
                if self._hook is not None:
                    await self._hook.end(code)
                self._reap_fork_server(_END_TIMEOUT)

    async def _wait_until_ready(self) -> bool:
        """Wait for the imports of the fork server and for the other nodes. False if one of them never comes."""
        self._joining = asyncio.get_running_loop().create_task(self._coordinator.join())
        imports = asyncio.get_running_loop().create_task(self._fork_server_ready())
        try:
            await asyncio.wait((self._joining, imports), return_when=asyncio.FIRST_EXCEPTION)
            if self._joining.done() and not self._joining.cancelled():
                self._joining.result()
            if not imports.done() or not imports.result():
                return False
            if not self._joining.done():
                await asyncio.wait((self._joining,))
            return not self._joining.cancelled() and self._signal is None and not self._lost_fork_server
        finally:
            for task in (self._joining, imports):
                task.cancel()
            await asyncio.gather(self._joining, imports, return_exceptions=True)
            self._console.waiting(None)

    @property
    def _may_recover(self) -> bool:
        """Return whether workers may be replaced, so that snapshots are worth their memory."""
        rendezvous = self._plan.rendezvous
        return self._plan.recovery.policy.most != 0 or (rendezvous is not None and rendezvous.elastic)

    def _is_worker(self, pid: int) -> bool:
        return self._attempt is not None and self._attempt.is_worker(pid)

    def receive_rpc(self, sender: int | None, frame: messages.RpcFrame) -> None:
        """Take a frame of another node."""
        self.rpc.receive(sender, frame)

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line, unless --quiet, and write it to the run folder.

        `repeats`: an event with the same content is already there, and only the console needs the line.
        """
        self._folder.event(events.NoteEvent(time=time.time(), text=text, repeats=repeats))
        if not self._plan.output.quiet:
            self._console.say(text)

    def waiting(self, text: str | None) -> None:
        """Show what the run waits for: one line that changes on a terminal, a line from time to time elsewhere."""
        self._console.waiting(text)
        if text is None or self._console.terminal(Std.ERR):
            return
        now = time.monotonic()
        self._last_waiting_note = self._last_waiting_note or now - _WAITING_INTERVAL + _WAITING_DELAY
        if now - self._last_waiting_note > _WAITING_INTERVAL:
            self._last_waiting_note = now
            self.note(text, repeats=True)

    def say(self, text: str) -> None:
        """Print a line, unless --quiet, that is not an event: the run folder has it already."""
        if not self._plan.output.quiet:
            self._console.say(text)

    @property
    def plan(self) -> Plan:
        """Return the current plan: ranks change when nodes join or leave."""
        return self._plan

    @property
    def attempt(self) -> WorkerGroup | None:
        """Return the worker group of the current attempt."""
        return self._attempt

    @property
    def fork_server(self) -> ForkServerClient:
        """Return the current fork server."""
        return self._fork_server

    @property
    def _ending(self) -> bool:
        return self._signal is not None or self._error is not None

    # -- the fork server

    async def _fork_server_ready(self) -> bool:
        """Wait for the imports of the fork server. False if it ends before."""
        report = await self._listen()
        if report.get("failed"):
            report = await self._import_failed(report)
        if report.get("unsafe"):
            report = await self._start_fresh(report["unsafe"])
        if self._signal is not None or not report:
            return False
        if self._attempt is None and not self.all_joined:  # a later fork server prints the same
            self._show_import_output()
        self._folder.event(
            events.ForkServerReady(
                time=time.time(),
                pid=report["pid"],
                mode=self._fork_server.way,
                seconds=round(sum(report["seconds"].values()), 3),
                imports={name: took for name, took in report["seconds"].items() if took >= 0.01},
            )
        )
        return True

    async def _listen(self) -> wire.Message:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._imported = self._fork_server.ready is not None
        loop.add_reader(self._fork_server.sock.fileno(), self._fork_server_message)
        if self._fork_server.ready is not None:
            self._resolve(self._fork_server.ready)
        return await self._ready

    def _fork_server_message(self) -> None:
        message = self._fork_server.receive()
        if message is None:
            self._fork_server_gone()
            return
        match message["is"]:
            case "ready":
                self._imported = True
                self._resolve(message)
            case "born" if self._attempt is not None:
                self._orphans.note(message["pid"])
                self._attempt.worker_started(message["name"], message["pid"])
            case "exited" if self._attempt is not None:
                self._attempt.worker_exited(message)
            case "refused" if self._attempt is not None:
                self._attempt.start_refused(message["name"], message["why"])
            case "signalled":
                self._signals.fork_server_received(message["signal"])
            case "swept" | "orphans" if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)

    def _resolve(self, message: wire.Message) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(message)

    def _fork_server_gone(self) -> None:
        """Handle the end of the connection: the workers are dead, and this process adopts their children."""
        asyncio.get_running_loop().remove_reader(self._fork_server.sock.fileno())
        code = self._fork_server.gone()
        if not self._closing:
            self._lost_fork_server = "unknown" if code is None else root_cause.in_words(code)
        self._resolve({})
        if self._joining is not None:
            self._joining.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result({})
        if self._attempt is not None:
            self._attempt.fork_server_lost()
            if self._lost_fork_server and not self._attempt.over.is_set():
                self._decide(self._attempt.shared_failure("the fork server was ended from outside", place="forkserver"))

    async def _start_another_fork_server(self) -> bool:
        """Replace a fork server that was killed. False if it never becomes ready."""
        await self._end_orphans()
        if self._ending:
            return False
        self._lost_fork_server = ""
        with open(f"{self._folder.path}/forkserver.log", "ab") as log:
            self._fork_server = fork_servers.make(self._plan, self._preload_hints, log=log.fileno())
        return await self._fork_server_ready()

    async def _replace_fork_server(self, attempt: WorkerGroup) -> None:
        """Start a new fork server and all workers of this node. They join the next generation of the group."""
        self.note(f"the fork server was ended from outside: {self._lost_fork_server}; another takes its place")
        try:
            # The new one may be killed too.
            while self._lost_fork_server and not attempt.over.is_set() and not self._ending:
                if (
                    await self._start_another_fork_server()
                    and self._next_regroup is not None
                    and not attempt.over.is_set()
                ):
                    attempt.use_fork_server(self._fork_server)
                    attempt.regroup(self._next_regroup)
        except PhalanxError as error:
            self.fail(error)
        finally:
            self._replacing = None
            if not attempt.living:
                attempt.over.set()

    async def _end_orphans(self) -> None:
        """End the processes that workers of a killed fork server had started."""
        if self._fork_server.process is not None and not self._leave_orphans and not self._fork_server_ended:
            besides = self._dashboard.pids | (self._hook.pids if self._hook is not None else frozenset())
            await asyncio.to_thread(self._orphans.end, besides=besides)

    async def _import_failed(self, report: wire.Message) -> wire.Message:
        """Handle failed imports: a module that the user named must exist; torch may not be needed by the script."""
        for name, why in report["failed"].items():
            if name in self._plan.start.preload:
                raise LaunchError(
                    f"--preload {name} cannot be imported: {why}",
                    details=[f"what imports printed: {self._folder.path}/forkserver.log"],
                    fix=f"{self._plan.command.python} -c 'import {name}' shows the same; leave it out of --preload",
                )
        name, why = next(iter(report["failed"].items()))
        return await self._start_fresh(f"{name} cannot be imported there ({why})")

    async def _start_fresh(self, reason: str) -> wire.Message:
        """Start every rank as a new interpreter, because forking is not safe after these imports."""
        self._folder.event(events.ForkServerRefused(time=time.time(), reason=reason))
        if self._preload_hints is not None and self._preload_hints.modules:
            self._preload_hints.refuse()
        self.note(f"{reason}, so every rank gets an interpreter of its own (as with --fresh)")
        await self._end_fork_server()
        if self._signal is not None:
            return {}
        self._reap_fork_server(1.0)
        self._closing, self._fork_server_ended, self._preload_hints = False, False, None
        with open(f"{self._folder.path}/forkserver.log", "ab") as log:
            self._fork_server = fork_servers.fresh(self._plan.environ, log=log.fileno())
        return await self._listen()

    def _show_import_output(self) -> None:
        """Print what imports have printed, such as warnings, once for all ranks."""
        with contextlib.suppress(OSError), open(f"{self._folder.path}/forkserver.log", errors="replace") as file:
            text = file.read(4096).strip()
            if text:
                self.note("while importing:\n" + "\n".join(f"  {line}" for line in text.splitlines()))

    async def _sweep(self) -> None:
        """End all processes below the fork server."""
        await self._ask_fork_server("sweep")

    async def _ask_fork_server(self, what: str) -> wire.Message:
        """Send a request and return the answer. Empty if the fork server is gone."""
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._fork_server.send({"do": what})
        except OSError:
            return {}
        return await self._answer

    async def _end_fork_server(self) -> None:
        """Let the fork server end all its processes and exit. Kill it if it does not answer."""
        fork_server = self._fork_server
        self._closing = True
        if fork_server.sock.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(fork_server.sock.fileno())
        if fork_server.process is not None and self._ready is not None and not self._imported:
            fork_server.process.kill()  # it still imports: it reads no messages and has started no process
        ended: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(fork_server.sock.fileno(), _read_end, fork_server, ended)
        with contextlib.suppress(OSError):
            fork_server.send({"do": "end", "leave": self._leave_orphans})
        await asyncio.wait((ended,), timeout=_END_TIMEOUT)
        loop.remove_reader(fork_server.sock.fileno())
        fork_server.sock.close()
        self._fork_server_ended = ended.done() and ended.result()
        if not self._fork_server_ended:
            self._reap_fork_server(1.0)

    def _reap_fork_server(self, timeout: float) -> None:
        """Wait for the process of the fork server to exit, and kill it after `timeout` seconds."""
        process = self._fork_server.process
        if process is None or process.poll() is not None:
            return
        handle = os.pidfd_open(process.pid)
        gone, _, _ = select.select([handle], [], [], timeout)
        os.close(handle)
        if not gone:
            process.kill()
        process.wait()

    async def _close(self) -> None:
        """End all processes of the run on this node."""
        await self._end_fork_server()
        await self._end_orphans()

    # -- attempts

    async def _run_attempts(self) -> tuple[int, str]:
        """Run attempts until the run is over. Returns its exit code and the message about it."""
        next_ = await self._coordinator.first_attempt()
        while isinstance(next_, StartAttempt):
            if self._error is not None:
                raise self._error
            self._plan = next_.plan
            if self._lost_fork_server and not await self._start_another_fork_server():
                return self._never_started(), ""
            attempt = await self._run_attempt(next_)
            next_ = await self._finish_attempt(attempt)
        if self._error is not None:
            raise self._error
        stall_report = self._hang_detector.final_report if self._hang_detector is not None else ""
        if self._signal is not None:
            if stall_report:
                self._console.say(stall_report)
            return 128 + self._signal, ""
        timings = self._step_timings.final_report(succeeded=next_.code == 0) if self._step_timings is not None else ""
        if timings:
            self.say(timings)
        if next_.text:
            self._console.say(next_.text)
            if next_.code:
                what, *details = next_.text.splitlines()
                error_report.write(LaunchError(what, details=details), self._plan.environ)
        if stall_report and next_.code:
            self._console.say(stall_report)
        return next_.code, next_.text

    async def _run_attempt(self, start: StartAttempt) -> WorkerGroup:
        coordinator = self._coordinator
        rendezvous = start.plan.rendezvous
        context = WorkerGroupContext(
            start.plan,
            self._folder,
            self._console,
            start.listener,
            self.note,
            self._worker_failed,
            coordinator.regroup_ready,
            coordinator.first_step,
            coordinator.halt_message,
            coordinator.log_forwarder,
            echo=coordinator.log_forwarder is None or rendezvous is None or rendezvous.echo,
            memory=self._snapshot_memory.name if self._snapshot_memory is not None else "",
            board=self._board,
            probe_message=self._debugging.probe_message if self._debugging is not None else None,
            measured=self._measured,
            blame=self._blame,
        )
        attempt = self._attempt = WorkerGroup(
            start.attempt, context, self._fork_server, self._preload_hints, start.generation
        )
        attempt.prepare_store()
        for seat in start.plan.seats:
            if self._signal is not None or self._early_stop is not None or attempt.stopping or attempt.over.is_set():
                break
            attempt.start_worker(seat, spare=start.plan.spare)
            await asyncio.sleep(0)  # handle messages of the fork server, and signals
        self._early_stop = None
        if self._watchers_start is None:
            self._watchers_start = asyncio.get_running_loop().create_task(self._start_watchers(attempt))
        regroup = self._next_regroup
        if regroup is not None and regroup.generation > start.generation:  # it came while this attempt began
            self._regroup(regroup)
        if not attempt.living and self._replacing is None:
            attempt.over.set()
        await attempt.over.wait()
        return attempt

    async def _start_watchers(self, attempt: WorkerGroup) -> None:
        await asyncio.sleep(_WATCH_DELAY)
        exits, detector, timings, collector, sampler = await asyncio.to_thread(_import_watchers)
        if self._control_socket is not None:
            nodes = (self, self._coordinator, self.rpc)
            self._sampler = sampler(*nodes, attempt=attempt)
            stats = self._sampler.stats
            self._exits = exits(self, stats)
            context = WatchContext(*nodes, self._control_socket, self._folder)
            self._hang_detector = detector(context, stats=stats, attempt=attempt)
            self._step_timings = timings(context)
            self._collector = collector(*nodes, self._folder)
            self._sampler.start(self._hang_detector, self._step_timings, self._collector)

    async def _blame(self, rank: int, timeout: Timeout) -> list[str]:
        if self._hang_detector is None and self._watchers_start is not None:
            await asyncio.wait((self._watchers_start,))
        return await self._hang_detector.blame(rank, timeout) if self._hang_detector is not None else []

    def _measured(self, message: worker_messages.MeasuredStep) -> None:
        if self._collector is not None:
            self._collector.measured(message)

    async def _finish_attempt(self, attempt: WorkerGroup) -> StartAttempt | RunResult:
        """Clean up after an attempt, report it, and return what comes next."""
        if self._replacing is not None:
            await asyncio.wait((self._replacing,))
        await self._coordinator.wait_for_others()
        if self._sampler is not None:
            self._sampler.concluded()
        attempt.close()
        if self._may_linger(attempt):
            return await self._finish_successful_attempt(attempt)
        if self._ending or self._coordinator.is_last_attempt(failed=bool(attempt.failed)):
            await self._close()
        elif self._lost_fork_server:
            self._attempt = None
            await self._end_orphans()
        else:
            # Also the store: the next attempt gets an empty one on the same port, without keys of dead ranks.
            self._attempt = None
            await self._sweep()
        await attempt.output.drained(2.0)
        self._next_regroup = None  # a later one belongs to the next attempt
        try:
            if self._error is not None:
                raise self._error
            return await self._coordinator.attempt_ended(self._report(attempt))
        finally:
            attempt.output.close()

    def _may_linger(self, attempt: WorkerGroup) -> bool:
        """Return whether all ranks here have succeeded and no attempt follows, so that their processes may stay."""
        if self._ending or self._lost_fork_server or attempt.failed:
            return False
        last = self._coordinator.is_last_attempt(failed=False)
        return last if self._coordinator.leads else not last  # a follower returns True only if node 0 is lost

    async def _finish_successful_attempt(self, attempt: WorkerGroup) -> StartAttempt | RunResult:
        """Report success. Processes that ranks left running stay until all nodes have ended, then for `--linger`."""
        left = LingeringProcesses(self._find_orphans, ranks=attempt.ranks, run=self._folder.name)
        limit = self._plan.shutdown.linger
        await left.settle()
        if left.orphans:
            attempt.output.catch_up_all()  # they may keep the pipes open
        else:
            if left.helpers:
                await self._sweep()
            await attempt.output.drained(2.0)
        self._next_regroup = None  # a later one belongs to the next attempt
        try:
            if self._error is not None:
                raise self._error
            next_ = await self._coordinator.attempt_ended(replace(self._report(attempt), left=left.text(limit)))
            if isinstance(next_, StartAttempt):
                self._attempt = None
                await self._sweep()
                return next_
            if next_.code == 0 and not self._ending:
                self._lingering = left
                if left.orphans:
                    await self._linger(left, next_)
            await self._close()
            if self._leave_orphans:
                attempt.output.leave()
            await attempt.output.drained(2.0)
            return next_
        finally:
            attempt.output.close()

    async def _linger(self, left: LingeringProcesses, verdict: RunResult) -> None:
        """Wait for processes that ranks left running. The other nodes need not wait."""
        limit = self._plan.shutdown.linger
        self._coordinator.announce_result(verdict.code, verdict.text)
        self.note(left.text(limit))
        self._leave_orphans = limit is None
        if limit and not await left.wait(limit):
            self.note(left.text(limit, expired=True))

    async def _find_orphans(self) -> Sequence[int]:
        return tuple((await self._ask_fork_server("orphans")).get("pids", ()))

    def _report(self, attempt: WorkerGroup) -> AttemptReport:
        if self._signal is not None:
            return AttemptReport(attempt.number)
        if self._lost_fork_server:
            how = f"the fork server was ended from outside: {self._lost_fork_server}; its workers ended with it"
            return AttemptReport(attempt.number, trouble=how)
        if not attempt.failed:
            return AttemptReport(attempt.number)
        deaths, block = attempt.explain_failures(out_of_memory.read().since(self._kills))
        return AttemptReport(attempt.number, deaths, block, failed=root_cause.count(deaths))

    def _never_started(self) -> int:
        if self._error is not None:
            raise self._error
        if self._signal is not None:
            return 128 + self._signal
        raise LaunchError(
            f"the interpreter that was to import torch ended early: {self._lost_fork_server or 'unknown'}",
            details=[f"what it printed: {self._folder.path}/forkserver.log"],
            fix="phalanx run --fresh … starts every rank by itself",
        )

    # -- signals

    def _signal_received(self, number: signal.Signals) -> None:
        """End the run because of a signal of the user or a scheduler."""
        if self._stop_lingering():
            return
        ends = self._signal is not None or self._preempting is not None
        if number == signal.SIGINT and not ends and self._debugging is not None and self._debugging.interrupted():
            return
        if self._preempting is not None and self._signal is None and number == signal.SIGINT:
            self._signal_received(signal.SIGTERM)  # the second request: end at once
        if not self._draining_output and self._signal is None:
            self._coordinator.signal_received(number)
        elif number == signal.SIGINT and not self._draining_output:
            self._coordinator.signal_received(signal.SIGKILL)
        self._handle_signal(number, ours=True)

    def _preempted(self, number: signal.Signals) -> None:
        """Handle a signal that announces preemption: write a checkpoint if possible. A second signal ends the run."""
        if self._stop_lingering():
            return
        now = time.monotonic()
        if self._preempting is not None and now - self._preempting < SAME:
            return
        first = self._preempting is None and self._signal is None and self._attempt is not None
        if first and self._coordinator.preempt(number):
            self._preempting = now
        elif number in self._plan.shutdown.signals:
            self._signal_received(number)
        else:
            self._forward_signal(number)

    # -- actions of the coordinator

    def _worker_failed(self, failure: WorkerFailure) -> None:
        """Decide about a failure after the worker group, which reports it, has handled the exit."""
        asyncio.get_running_loop().call_soon(self._decide, failure)

    def _decide(self, failure: WorkerFailure) -> None:
        action = self._coordinator.worker_failed(failure)
        if action is not None:
            self.perform(action)

    def perform(self, action: Action) -> None:
        """Execute an action of the coordinator."""
        match action:
            case RegroupPlan():
                self._regroup(action)
            case StopWorkers():
                self._stop_attempt(action)
            case HoldWorkers():
                self._hold(action.why)
            case HaltWorkers():
                self._halt(action.step)
            case AcceptLoss():
                self._accept_loss()
            case SignalWorkers():
                self._signal_workers(action.signal)
            case EndRun():
                self._end_run(action.signal, action.reason)

    def _end_run(self, number: signal.Signals, reason: str) -> None:
        """End the run because of a signal to another node, or because the time for a checkpoint is over."""
        if self._stop_lingering():
            return
        self._folder.event(events.NoteEvent(time=time.time(), text=reason))
        if number == signal.SIGKILL and self._attempt is not None:
            self._attempt.kill()
        elif self._signal is None:  # else this agent received the signal too
            self._handle_signal(number)

    def fail(self, error: PhalanxError) -> None:
        """End the run with this error, which comes neither from a worker nor from the coordinator."""
        if self._error is not None or self._signal is not None or self._stop_lingering():
            return
        self._error = error
        self._resolve({})
        if self._joining is not None:
            self._joining.cancel()
        if self.all_joined and self._plan.rendezvous is not None and self._plan.rendezvous.leads:
            self._coordinator.signal_received(signal.SIGTERM)
        self._stop_attempt(StopWorkers(signal.SIGTERM, error.what, self._plan.shutdown.failure_timeout))

    def _stop_lingering(self) -> bool:
        """End the wait for lingering processes. False if there is none: the run has not succeeded yet."""
        if self._lingering is None or self._draining_output:
            return False
        self._lingering.stop()
        if self._hook is not None:
            self._hook.hurry()
        return True

    def _stop_attempt(self, stop: StopWorkers) -> None:
        """Stop the workers of the current attempt, or of the next one before it begins."""
        if self._attempt is None:
            self._early_stop = stop
        elif not self._attempt.living:
            self._resolve({})  # ends the wait for a replacement of the fork server
            self._attempt.over.set()
        elif not self._attempt.stopping:
            self._attempt.stop(stop.signal, stop.reason, stop.grace)

    def _regroup(self, to: RegroupPlan) -> None:
        """Form a new group: replace workers that have died, here or elsewhere."""
        attempt, self._next_regroup = self._attempt, to
        if attempt is None or attempt.over.is_set():
            return
        self._plan = to.plan
        if self._signal is not None or attempt.stopping:
            if not attempt.living:
                attempt.over.set()
        elif self._lost_fork_server or self._replacing is not None:
            if self._replacing is None:
                self._replacing = asyncio.get_running_loop().create_task(self._replace_fork_server(attempt))
        else:
            attempt.regroup(to)

    def _hold(self, why: str) -> None:
        """Let workers wait for other nodes."""
        if self._attempt is not None and self._signal is None and not self._attempt.stopping:
            self._attempt.hold(why)

    def _accept_loss(self) -> None:
        """Do not replace a worker that died. If it was the last, the attempt is over."""
        if self._attempt is not None and not self._attempt.living:
            self._attempt.over.set()

    def _halt(self, step: int | None) -> None:
        """Have workers report their committed step, or halt at `step`."""
        if self._attempt is not None and self._signal is None and not self._attempt.stopping:
            self._attempt.halt(step)

    def _handle_signal(self, number: signal.Signals, *, ours: bool = False) -> None:
        again = self._signal is not None
        self._signal = self._signal or number
        attempt = self._attempt
        if self._draining_output:
            self._console.abandon()
            if self._hook is not None:
                self._hook.hurry()
        elif attempt is None:
            self._resolve({})
            if self._joining is not None:
                self._joining.cancel()
        elif again and number == signal.SIGINT:
            self.note("ending at once")
            self._console.abandon()
            attempt.kill()
        elif not again:
            if number == signal.SIGINT and ours:
                self.note("stopping; Ctrl-C again ends at once")
            self._signals.when_attributed(self._stop_workers, number)

    def _forward_signal(self, number: signal.Signals) -> None:
        """Forward a signal to the workers that handle it. Others would die of it."""
        self._coordinator.forward_signal(number)
        self._signals.when_attributed(self._signal_workers, number)

    def _stop_workers(self, number: signal.Signals) -> None:
        if self._attempt is not None and not self._attempt.living:
            self._resolve({})
            self._attempt.over.set()
        elif self._attempt is not None:
            reason = f"{number.name} received"
            self._attempt.stop(
                number, reason, self._plan.shutdown.stop_timeout, already_sent=self._signals.workers_received(number)
            )

    def _signal_workers(self, number: signal.Signals) -> None:
        if self._signals.workers_received(number):
            self.note(f"{number.name} received, by every process of this job")
            return
        received = []
        for name, worker in self._attempt.living if self._attempt is not None else ():
            if linux.handles(worker.pid, number) and self._attempt is not None:
                self._attempt.send_signal(name, number, alone=True)
                received.append(worker.seat.rank)
        if received:
            self.note(
                f"{number.name} received, and given to rank{'s' if len(received) > 1 else ''} {_rank_list(received)}"
            )
        else:
            self.note(f"{number.name} received; no rank handles it, so none was given it")

    def _resized(self) -> None:
        if self._attempt is not None:
            ranks = self._attempt.output.resized()
            for name, worker in self._attempt.living:
                if worker.seat.rank in ranks:
                    self._attempt.send_signal(name, signal.SIGWINCH)


def _import_watchers() -> tuple[type[Exits], type[HangDetector], type[StepTimings], type[Collector], type[NodeSampler]]:
    """Import what watches the workers, in a thread."""
    from phalanx.launcher.agent.exits import Exits
    from phalanx.launcher.hangs.detector import HangDetector
    from phalanx.launcher.telemetry.collector import Collector
    from phalanx.launcher.telemetry.node_sampler import NodeSampler
    from phalanx.launcher.telemetry.step_timings import StepTimings

    return Exits, HangDetector, StepTimings, Collector, NodeSampler


def _rank_list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _read_end(fork_server: ForkServerClient, ended: asyncio.Future[bool]) -> None:
    """Resolve `ended` when the fork server is done. True: it has ended all its processes, and exits."""
    try:
        message = fork_server.receive()
    except (OSError, ValueError):
        message = None
    if message is None or message["is"] == "ended":
        asyncio.get_running_loop().remove_reader(fork_server.sock.fileno())
        ended.set_result(message is not None and not message["left"])
