"""The process that hosts the store of an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from phalanx.contract import events
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.workers import Workers

NAME = "store"  # as the fork server knows it
_MOST_LOST = 3  # replacements per attempt: a store that cannot start would be replaced for ever


class StoreProcess:
    """Starts the store if this node hosts it, and replaces it if it ends."""

    def __init__(
        self,
        plan: Plan,
        listener: socket.socket | None,
        workers: Workers,
        *,
        folder: RunFolder,
        note: Callable[[str], None],
        over: asyncio.Event,
    ) -> None:
        self._plan = plan
        self._listener = listener  # bound once: each attempt has a new store at the same address. None: another node's
        self._workers = workers
        self._folder = folder
        self._note = note
        self._over = over  # of the attempt
        self._started = False
        self._stopped = False  # on purpose
        self._lost = 0

    def prepare(self) -> None:
        """Start the store, or let the first connection start it.

        Where torch is imported already, a store costs a fork. Elsewhere it costs an import, and many scripts never
        use it.
        """
        if self._listener is None:
            return
        if self._workers.fork_server.forks:
            self._start()
        else:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._start)

    def _start(self) -> None:
        listener = self._listener
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener.fileno())
        if self._started or self._over.is_set():
            return
        self._started, self._stopped = True, False
        fork_server = self._workers.fork_server
        order = fork_servers.store_order(fork_server, self._plan, self._plan.group.master_port)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fork_server.send(order, [nowhere, log, log, listener.fileno()])
        os.close(nowhere)
        os.close(log)

    @property
    def _log(self) -> str:
        return f"{self._folder.path}/store.log"

    def exited(self, code: int) -> bool:
        """Replace the store. Without it no group can form, but an existing group continues. False: not replaced."""
        if self._stopped:
            return False
        self._folder.event(events.StoreLost(time=time.time(), code=code))
        self._lost += 1
        if self._lost > _MOST_LOST:
            self._note(f"the store process ends again and again; see {self._log}")
            return False
        self._note(f"the store process ended ({root_cause.in_words(code)}); a new one takes its place, empty")
        self._started = False
        self._start()
        return True

    def move(self, plan: Plan, listener: socket.socket | None) -> None:
        """Follow a new plan: stop or start the store if another node hosts it from now on or hosted it before."""
        before, self._plan, self._listener = self._listener, plan, listener
        if listener is before:
            return
        if before is not None:
            asyncio.get_running_loop().remove_reader(before.fileno())
            if self._started:
                self._stopped = True
                self._workers.send_signal(NAME, signal.SIGTERM)
        self._started = False
        self.prepare()

    def fork_server_lost(self) -> None:
        """Record that the store has died with its fork server."""
        self._started = False

    def close(self) -> None:
        """Stop waiting for a connection that would start the store."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
