"""Starts the workers of an attempt."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from itertools import count

from phalanx.cluster.placement import Seat
from phalanx.contract.messages import worker_messages
from phalanx.forkserver import wire
from phalanx.forkserver.child.error_file import TRACEBACK
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.plan import Plan
from phalanx.launcher.workers.context import WorkerGroupContext
from phalanx.launcher.workers.formation import Formation
from phalanx.launcher.workers.probes import ProbeClient
from phalanx.launcher.workers.worker import Worker, cuda_device
from phalanx.launcher.workers.workers import Workers

ProbeMessage = Callable[[str, wire.Message, list[int]], None]  # name of the worker, message, descriptors


class Spawner:
    """Orders workers from the fork server, with their environment, output, stdin and probe."""

    def __init__(
        self,
        attempt: int,
        context: WorkerGroupContext,
        workers: Workers,
        output: OutputCapture,
        *,
        channel: str,
        hints: PreloadHints | None,
        on_probe_message: ProbeMessage,
    ) -> None:
        self._attempt = attempt
        self._context = context
        self._workers = workers
        self._output = output
        self._channel = channel  # address of the agent for workers that can regroup
        self._hints = hints
        self._on_probe_message = on_probe_message
        self._names = map(str, count())
        self._hellos: dict[int, worker_messages.Hello] = {}  # by local rank, of its latest worker
        self._variables_set: list[dict[str, str | None]] = []  # variables that ranks set before they imported torch

    def start(self, formation: Formation, seat: Seat, *, spare: bool = False) -> None:
        """Order a worker for this rank from the fork server. Does nothing while a lost one is being replaced: the
        group is formed again with the next one, and missing spares are started then.
        """
        plan, fork_server = formation.plan, self._workers.fork_server
        if fork_server.closed:
            return
        name = next(self._names)
        folder = self._folder(f"spare.{name}" if spare else str(seat.rank), formation.generation)
        environ = self._environment(plan, seat, folder)
        order = fork_servers.worker_order(fork_server, name, plan.command, seat, environ)
        if self._hints is not None:
            order["assumed"] = list(self._hints.variables)
            if seat.rank == 0 and fork_server.mode == "cold":
                order["hints"] = self._hints.path
        if (device := cuda_device(self._hellos.get(seat.local_rank), environ)) is not None:
            order["cuda"] = device
        self._keep_sources(order)
        output = plan.output
        out, err = self._output.open(
            seat.rank,
            folder,
            show=output.shown(seat),
            terminal=seat.rank == 0,
            apart=output.separate(seat),
            traceback=None if output.verbose else f"{folder}/{TRACEBACK}",
        )
        stdin = self._stdin(plan, seat.rank)
        probe = self._probe(name)
        if probe is not None:
            order["probe"] = probe.slot
            probe.set_rank(None if spare else seat.rank)
        self._workers.add(name, Worker(seat, folder, started_at=time.monotonic(), spare=spare, probe=probe))
        with contextlib.suppress(OSError):  # the fork server has ended: this worker is lost with it
            fork_server.send(order, [stdin, out, err, *(probe.fds if probe is not None else ())])
            if probe is not None:
                probe.handed_over()
        os.close(stdin)
        self._output.handed_over(seat.rank)

    def _keep_sources(self, order: wire.Message) -> None:
        """Make the worker run the sources of the run's start, if files have changed since: ranks must not mix
        versions.
        """
        sources = self._context.sources
        changed = sources.changed() if sources is not None else {}
        if sources is not None and changed:
            sources.tell(changed, self._context.note)
            order["kept"] = {path: text.decode("latin-1") for path, text in changed.items()}

    def _folder(self, label: str, generation: int) -> str:
        """Return the folder for the logs of a worker, without the error files of an earlier one."""
        run_folder = self._context.folder
        folder = run_folder.rank_folder(self._attempt, label)
        if any(worker.folder == folder for _, worker in self._workers.living):  # it had this rank before
            folder = run_folder.rank_folder(self._attempt, f"{label}.{generation}")
        for name in ("error.json", TRACEBACK):
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/{name}")
        return folder

    def _environment(self, plan: Plan, seat: Seat, folder: str) -> dict[str, str]:
        return plan.environment(
            seat,
            attempt=self._attempt,
            run=self._context.folder.name,
            folder=self._context.folder.path,
            rank_folder=folder,
            port=plan.group.master_port,
            line=self._channel,
            memory=self._context.memory,
        )

    def _stdin(self, plan: Plan, rank: int) -> int:
        """Return the agent's stdin for one rank, if it may read the terminal; /dev/null for the others.

        A script from stdin (`phalanx run -`) is for all ranks, and each reads it from the start.
        """
        if plan.command.kind == "stdin":
            return os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
        if rank == plan.stdin_rank and not self._context.console.hidden:
            with contextlib.suppress(OSError):
                if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                    return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _probe(self, name: str) -> ProbeClient | None:
        board = self._context.board
        slot = board.allocate() if board is not None else None
        if board is None or slot is None:
            return None
        return ProbeClient(board, slot, lambda message, fds: self._on_probe_message(name, message, fds))

    def connected(self, worker: Worker, hello: worker_messages.Hello) -> None:
        """Store the device and variables of a worker, for the one that may replace it."""
        self._hellos[worker.seat.local_rank] = hello

    def imported_too_early(self, worker: Worker, message: wire.Message) -> None:
        """Handle a script that set variables which the fork server's imports had already read: the next run knows
        them.
        """
        if not message["late"]:
            self._output.repeats(worker.seat.rank)
        if self._hints is None:
            return
        if not self._variables_set:
            does = "ignored there" if message["late"] else "starting it again as a fresh interpreter"
            names = ", ".join(message["variables"])
            self._context.note(f"rank {worker.seat.rank} set {names} before an import that reads it: {does}")
        self._variables_set.append(message["variables"])
        self._hints.learned(self._variables_set).save()
        if message["late"]:
            self._hints.refuse()
