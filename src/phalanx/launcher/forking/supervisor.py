"""The fork server of a run: waits for its imports, replaces it if needed, and ends it with all processes below it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence

from phalanx.contract import events
from phalanx.errors import LaunchError
from phalanx.forkserver import linux, wire
from phalanx.forkserver.orphans import Orphans
from phalanx.launcher.forking import fork_servers, liveness
from phalanx.launcher.forking.connection import END_TIMEOUT, ForkServerConnection
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.forking.source_snapshot import SourceSnapshot
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.run_folder import RunFolder


class ForkServerSupervisor:
    """Supervises the fork server of a run, and its replacements. Needs a running event loop.

    `is_ending` returns whether the run must end, so that no other fork server is started. `foreign_pids` returns the
    children of this process that it must not end: they are not part of the run, or have outlived a fork server.
    `on_message` gets messages about processes and signals, `on_lost` is called when a fork server was lost.
    """

    def __init__(
        self,
        client: ForkServerClient,
        plan: Plan,
        hints: PreloadHints | None,
        *,
        folder: RunFolder,
        note: Callable[[str], None],
        is_ending: Callable[[], bool],
        foreign_pids: Callable[[], frozenset[int]],
        on_message: Callable[[wire.Message], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.hints = hints  # None: every rank is a new interpreter
        self.keep_orphans = False  # leave processes running that ranks left running
        self.sources = SourceSnapshot(plan.command, plan.environ)  # read while the fork server imports
        self._plan = plan
        self._folder = folder
        self._note = note
        self._is_ending = is_ending
        self._foreign_pids = foreign_pids
        self._on_message = on_message
        self._on_lost = on_lost
        self._orphans = Orphans()
        self._adopts = False  # a fork server was lost, so processes of the run may be children of this process
        self._connection = self._connect(client)

    @property
    def client(self) -> ForkServerClient:
        """Return the current fork server."""
        return self._connection.client

    @property
    def lost(self) -> str:
        """Return how the current fork server was lost. Empty: it was not."""
        return self._connection.lost

    def startup_error(self) -> LaunchError:
        """Return the error of a run whose fork server never became ready."""
        return LaunchError(
            f"the fork server ended while it imported torch: {self.lost or 'unknown'}",
            details=[f"what it printed: {self._log_path}"],
            fix="phalanx run --fresh … starts every rank by itself",
        )

    async def wait_until_ready(self) -> bool:
        """Wait for the imports of the first fork server, and print their output. False if it ends before."""
        return await self._wait_until_ready(show_output=True)

    def stop_waiting(self) -> None:
        """End the wait for imports, of the first fork server or of a replacement."""
        self._connection.stop_waiting()

    async def replace(self, plan: Plan) -> bool:
        """Replace a fork server that was killed. False if the new one never becomes ready."""
        await self._end_orphans()
        if self._is_ending():
            return False
        self._plan = plan
        with open(self._folder.open_log(fork_servers.LOG), "ab") as log:
            client = fork_servers.make(plan, self.hints, log=log.fileno())
        self._connection = self._connect(client, start=liveness.IMPORT_TIMEOUT)
        return await self._wait_until_ready(show_output=False)  # it prints the same as the first

    def kill_if_stopped(self) -> None:
        """Kill the fork server if it is stopped, before workers are signalled through it."""
        self._connection.kill_if_stopped()

    async def orphans(self) -> Sequence[int]:
        """Return the processes that ranks have left running."""
        below = tuple((await self._connection.ask("orphans")).get("pids", ()))
        return (*below, *linux.descendants(os.getpid(), besides=self._kept())) if self._adopts else below

    async def end_processes(self) -> None:
        """End all processes that the fork server and the workers have started."""
        if not self.lost:
            await self._connection.ask("end_orphans")
        if self._adopts:
            await self._end_orphans()

    async def end(self) -> None:
        """End the fork server and all processes that it and the workers have started."""
        await self._connection.end(leave=self.keep_orphans)
        if self._adopts or not self._connection.ended:
            await self._end_orphans()

    def reap(self) -> None:
        """Wait for the process of the fork server to exit, after `end`."""
        self._connection.reap(END_TIMEOUT)

    def _connect(self, client: ForkServerClient, *, start: float = math.inf) -> ForkServerConnection:
        timeout = self._plan.recovery.worker_timeout
        return ForkServerConnection(client, self._receive, self._lost_connection, timeout=timeout, start=start)

    def _lost_connection(self) -> None:
        self._adopts = self._adopts or self.client.is_child
        self._on_lost()

    def _receive(self, message: wire.Message) -> None:
        if message["is"] == "started":
            self._orphans.note(message["pid"])
        self._on_message(message)

    async def _end_orphans(self) -> None:
        """End the processes that workers of a lost fork server had started: this process has adopted them."""
        if self.client.is_child and not self.keep_orphans:
            await asyncio.to_thread(self._orphans.end, besides=self._kept())

    def _kept(self) -> frozenset[int]:
        """Return the children of this process that must not be ended, with all their descendants."""
        fork_server = frozenset({self.client.pid}) if self.client.is_child else frozenset()
        return self._foreign_pids() | fork_server

    async def _wait_until_ready(self, *, show_output: bool) -> bool:
        report = await self._connection.ready()
        if report.get("failed"):
            report = await self._import_failed(report["failed"])
        if report.get("unsafe"):
            report = await self._start_fresh(report["unsafe"])
        if self._is_ending() or not report:
            return False
        if show_output:
            self._show_import_output()
        self._folder.event(
            events.ForkServerReady(
                time=time.time(),
                pid=report["pid"],
                mode=self.client.mode,
                seconds=round(sum(report["seconds"].values()), 3),
                imports={name: took for name, took in report["seconds"].items() if took >= 0.01},
            )
        )
        return True

    async def _import_failed(self, failed: dict[str, str]) -> wire.Message:
        """Handle failed imports: a module that the user named must exist; the script may not need torch."""
        for name, why in failed.items():
            if name in self._plan.start.preload:
                raise LaunchError(
                    f"--preload {name} cannot be imported: {why}",
                    details=[f"what imports printed: {self._log_path}"],
                    fix=f"{self._plan.command.python} -c 'import {name}' shows the same; leave it out of --preload",
                )
        name, why = next(iter(failed.items()))
        return await self._start_fresh(f"{name} cannot be imported there ({why})")

    async def _start_fresh(self, reason: str) -> wire.Message:
        """Start every rank as a new interpreter, because forking is not safe after these imports."""
        self._folder.event(events.ForkServerRefused(time=time.time(), reason=reason))
        if self.hints is not None and self.hints.modules:
            self.hints.refuse()
        self._note(f"{reason}, so every rank gets its own interpreter (as with --fresh)")
        await self._connection.end()
        if self._is_ending():
            return {}
        self._connection.reap()
        self.hints = None
        with open(self._folder.open_log(fork_servers.LOG), "ab") as log:
            self._connection = self._connect(fork_servers.fresh(self._plan.environ, log=log.fileno()))
        return await self._connection.ready()

    def _show_import_output(self) -> None:
        """Print the output of imports, such as warnings, once for all ranks."""
        with contextlib.suppress(OSError), open(self._log_path, errors="replace") as file:
            text = file.read(4096).strip()
            if text:
                self._note("while importing:\n" + "\n".join(f"  {line}" for line in text.splitlines()))

    @property
    def _log_path(self) -> str:
        return f"{self._folder.path}/{fork_servers.LOG}"
