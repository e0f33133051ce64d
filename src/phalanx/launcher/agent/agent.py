"""The agent of a node: it starts, watches and stops the workers, and reports why they ended.

It never imports torch, and waits only for events of its loop: messages of the fork server, output, signals.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time

from phalanx.contract import error_report
from phalanx.contract.exit_codes import stopped_by
from phalanx.control import messages
from phalanx.errors import LaunchError, PhalanxError
from phalanx.forkserver import linux, wire
from phalanx.launcher.actions import Action, EndRun, StartAttempt, StopWorkers
from phalanx.launcher.agent.attempts import AttemptLoop
from phalanx.launcher.agent.group_controller import GroupController
from phalanx.launcher.agent.notices import Notices
from phalanx.launcher.agent.run_hook import NoHook, RunHook
from phalanx.launcher.agent.services import NodeServices
from phalanx.launcher.agent.shutdown import Shutdown
from phalanx.launcher.agent.stopping.end_request import EndRequest
from phalanx.launcher.agent.stopping.signals import Signals
from phalanx.launcher.agent.watchers import Watchers
from phalanx.launcher.coordination.coordinator import Coordinator, RunResult
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.forking.supervisor import ForkServerSupervisor
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.display import FailureText
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.telemetry.out_of_memory import MemoryKillWatch
from phalanx.launcher.workers.context import WorkerGroupContext
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.launcher.workers.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


class NodeAgent:
    """Runs the workers of one node: `await NodeAgent(plan, ...).run()` returns the exit code.

    Create it in the event loop in which it runs.
    """

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
        self.all_joined = False  # every node has joined
        self._folder = folder
        self._console = console
        self._coordinator = coordinator
        self._hook = hook if hook is not None else NoHook()
        self._joining: asyncio.Task[None] | None = None
        self._memory_kills = MemoryKillWatch()
        self._rpc = NodeRpc(coordinator.links)
        self._notices = Notices(folder, console, quiet=plan.output.quiet)
        self._end_request = EndRequest()
        self._fork_server = ForkServerSupervisor(
            fork_server,
            plan,
            preload_hints,
            folder=folder,
            note=self.note,
            is_ending=lambda: self._end_request.made,
            foreign_pids=self._kept_pids,
            on_message=self._fork_server_message,
            on_lost=self._fork_server_lost,
        )
        signals = Signals(plan)
        self._controller = GroupController(
            plan, self._fork_server, signals, self._end_request, note=self.note, fail=self.fail
        )
        self._services = NodeServices(self, coordinator.links, self._rpc, folder=folder, console=console)
        self._watchers = Watchers(self._services.watch_context)
        self._shutdown = Shutdown(
            plan.shutdown,
            signals,
            self._end_request,
            workers=self._controller,
            coordinator=coordinator,
            hook=self._hook,
            console=console,
            notices=self._notices,
            interrupted=self._services.debugging.interrupted,
            stop_waiting=self._stop_waiting,
        )

    async def run(self) -> int:
        """Run until all processes of the run have ended, on all nodes. Returns the exit code."""
        linux.adopt_orphans()
        self._coordinator.attach(self)
        self._hook.begin(self)
        code, text, began = 1, "", time.monotonic()
        with self._shutdown.handlers():
            try:
                self._services.dashboard.start(leads=self._coordinator.links.leads)
                await self._services.dashboard.screen(self.note)
                self.all_joined = await self._wait_until_ready()
                if self.all_joined:
                    code, text = self._print_result(await self._run_attempts())
                else:
                    code = self._end_request.exit_code(self._fork_server.startup_error())
                self._print_stop(code)
                return code
            except PhalanxError as error:
                code, text = error.exit_code, str(error)
                raise
            except OSError as error:  # a full disk, a limit: tell the other nodes
                text = f"this node cannot continue: {error}"
                raise LaunchError(text) from error
            finally:
                self._rpc.close()
                await self._watchers.end()
                await self._fork_server.end()
                await self._services.close(code, time.monotonic() - began)
                self._shutdown.draining_output()
                self._console.waiting(None)
                await asyncio.to_thread(self._console.close)
                # Last: a scheduler may kill all tasks as soon as one has failed. At this point all output is written.
                await self._coordinator.close(code, text)
                await self._hook.end(code)
                self._fork_server.reap()

    # -- from the start to the result

    async def _wait_until_ready(self) -> bool:
        """Wait for the imports of the fork server and for the other nodes. False if one of them never arrives."""
        if self._end_request.made:
            return False
        loop = asyncio.get_running_loop()
        joining = self._joining = loop.create_task(self._coordinator.join())
        imports = loop.create_task(self._fork_server.wait_until_ready())
        try:
            await asyncio.wait((joining, imports), return_when=asyncio.FIRST_EXCEPTION)
            if joining.done() and not joining.cancelled():
                joining.result()
            if not imports.done() or not imports.result():
                return False
            if not joining.done():
                await asyncio.wait((joining,))
            return not joining.cancelled() and self._end_request.signal is None and not self._fork_server.lost
        finally:
            for task in (joining, imports):
                task.cancel()
            await asyncio.gather(joining, imports, return_exceptions=True)
            self._console.waiting(None)

    def _stop_waiting(self) -> None:
        """End the wait for imports and for other nodes."""
        self._fork_server.stop_waiting()
        if self._joining is not None:
            self._joining.cancel()

    async def _run_attempts(self) -> RunResult:
        attempts = AttemptLoop(
            self._coordinator,
            self._controller,
            self._fork_server,
            self._watchers,
            self._end_request,
            note=self.note,
            make_context=self._make_context,
            succeeded=self._shutdown.run_succeeded,
        )
        return await attempts.run()

    def _make_context(self, start: StartAttempt) -> WorkerGroupContext:
        coordinator = self._coordinator
        rendezvous = start.plan.rendezvous
        return WorkerGroupContext(
            self._folder,
            self._console,
            coordinator,
            self.note,
            self._worker_failed,
            coordinator.log_forwarder,
            echo=coordinator.log_forwarder is None or rendezvous is None or rendezvous.echo,
            memory=self._services.memory_address,
            board=self._services.board,
            probe_message=self._services.debugging.probe_message,
            measured=self._watchers.measured,
            blame=self._watchers.blame,
            memory_kill=self._memory_kills.latest,
            sources=self._fork_server.sources,
            store_peers=self._services.store_peers if rendezvous is not None else None,
        )

    def _print_result(self, result: RunResult) -> tuple[int, str]:
        """Print how the run ended. Returns its exit code and the message about it."""
        stall_report = self._watchers.stall_report()
        if self._end_request.signal is not None:
            if stall_report:
                self._console.say(stall_report)
            return 128 + self._end_request.signal, ""
        timings = self._watchers.timings_report(succeeded=result.code == 0)
        if timings:
            self.say(timings)
        if result.text:
            self._console.say(FailureText(result.text) if result.code else result.text)
            if result.code:
                what, *details = result.text.splitlines()
                error_report.write(LaunchError(what, details=details), self.plan.environ)
        if stall_report and result.code:
            self._console.say(stall_report)
        return result.code, result.text

    def _print_stop(self, code: int) -> None:
        """Print who stopped the run, on the node whose terminal shows it."""
        self._console.waiting(None)
        if self._end_request.signal is not None and self._coordinator.links.leads:
            self.say(f"stopped by {stopped_by(code) or self._end_request.signal.name}")

    # -- failures, and decisions of the coordinator

    def _worker_failed(self, failure: WorkerFailure) -> None:
        """Decide about a failure after the worker group, which reports it, has handled the exit."""
        asyncio.get_running_loop().call_soon(self._decide, failure)

    def _fork_server_message(self, message: wire.Message) -> None:
        self._controller.fork_server_message(message)

    def _fork_server_lost(self) -> None:
        self._stop_waiting()
        failure = self._controller.fork_server_lost()
        if failure is not None:
            self._decide(failure)

    def _kept_pids(self) -> frozenset[int]:
        """Return the children of this process that must survive the end of a fork server."""
        return self._services.dashboard.pids | self._watchers.pids | self._hook.pids | self._controller.adopted

    def _decide(self, failure: WorkerFailure) -> None:
        action = self._coordinator.worker_failed(failure)
        decided = type(action).__name__ if action is not None else "no action yet"
        logger.debug("%s; decided: %s", failure.reason, decided)
        if action is not None:
            self.perform(action)

    def perform(self, action: Action) -> None:
        """Execute an action of the coordinator."""
        logger.debug("performing %s", type(action).__name__)  # its contents include the environment of the script
        if isinstance(action, EndRun):
            self._shutdown.end_run(action.signal, action.reason)
        else:
            self._controller.perform(action)

    def fail(self, error: PhalanxError) -> None:
        """End the run with this error, which comes neither from a worker nor from the coordinator."""
        if self._end_request.made or self._shutdown.stop_lingering():
            return
        self._end_request.error = error
        self._stop_waiting()
        if self.all_joined and self.plan.rendezvous is not None and self.plan.rendezvous.leads:
            self._coordinator.signal_received(signal.SIGTERM)
        self._controller.perform(StopWorkers(signal.SIGTERM, error.what, self.plan.shutdown.failure_timeout))

    # -- for the coordinator, and for the watchers of the workers

    @property
    def plan(self) -> Plan:
        """Return the current plan: ranks change when nodes join or leave."""
        return self._controller.plan

    @property
    def attempt(self) -> WorkerGroup | None:
        """Return the worker group of the current attempt."""
        return self._controller.group

    @property
    def fork_server(self) -> ForkServerClient:
        """Return the current fork server."""
        return self._fork_server.client

    @property
    def idle(self) -> float:
        """Return the seconds since a worker of this node last reported a newer step. 0: none ever did."""
        return self.attempt.workers.idle if self.attempt is not None else 0.0

    def receive_rpc(self, sender: int | None, frame: messages.RpcFrame) -> None:
        """Handle a frame of another node."""
        self._rpc.receive(sender, frame)

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line, unless --quiet, and write it to the run folder.

        `repeats`: an event with the same content is already there, and only the console needs the line.
        """
        self._notices.note(text, repeats=repeats)

    def say(self, text: str) -> None:
        """Print a line, unless --quiet, that is not an event: it is already in the run folder."""
        self._notices.say(text)

    def waiting(self, text: str | None) -> None:
        """Show what the run waits for."""
        self._notices.waiting(text)
