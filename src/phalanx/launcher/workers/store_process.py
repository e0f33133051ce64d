"""The process that hosts the store of an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
import socket
import time
from collections.abc import Callable

from phalanx.contract import events
from phalanx.forkserver import linux, signed_store, wire
from phalanx.launcher.forking import fork_servers, liveness
from phalanx.launcher.forking.liveness import Liveness
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.store_peers import StorePeers
from phalanx.launcher.workers.workers import Workers
from phalanx.recover.decision import store_delay

NAME = "store"  # as the fork server knows it
_LOG = "store.log"
_MESSAGE = 4096  # bytes of a message of the store, at most


def leave_key(plan: Plan, folder: RunFolder) -> None:
    """Write the key with which ranks of this run sign values in the store (`forkserver/signed_store.py`).

    With several nodes it is derived from the token and the name of the run: all nodes know both, and nothing is sent.
    """
    if plan.rendezvous is None:
        key = os.urandom(32)
    else:
        key = hmac.digest(plan.rendezvous.token.key, f"phalanx store key\0{folder.name}".encode(), "sha256")
    signed_store.write_key(folder.path, key)


class StoreProcess:
    """Starts the store if this node hosts it, and replaces it if it ends or no longer answers."""

    def __init__(
        self,
        plan: Plan,
        listener: socket.socket | None,
        workers: Workers,
        *,
        folder: RunFolder,
        note: Callable[[str], None],
        over: asyncio.Event,
        peers: StorePeers | None,
    ) -> None:
        self._plan = plan
        # bound once: each attempt has a new store at the same address. None: another node hosts it
        self._listener = listener
        self._workers = workers
        self._folder = folder
        self._note = note
        self._over = over  # of the attempt
        self._peers = peers  # None: no other node has ranks
        self._asking: set[asyncio.Task[None]] = set()
        self._pid = 0  # 0: it does not run
        self._ordered = False  # from the fork server
        # to the store, which sends a heartbeat each second, and rejected callers
        self._link: socket.socket | None = None
        self._liveness = Liveness(plan.recovery.worker_timeout, start=liveness.IMPORT_TIMEOUT)
        self._failed_starts = 0  # consecutive stores that ended before they had answered
        self._watch: asyncio.Task[None] | None = None
        self._restart: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the store that runs. 0: there is none."""
        return self._pid

    @property
    def answers(self) -> bool:
        """Return whether the current store has answered."""
        return self._liveness.answered

    def prepare(self) -> None:
        """Start the store, or let the first connection start it.

        If torch is already imported, a store costs a fork. Otherwise it costs an import, and many scripts never use it.
        """
        if self._listener is None or self._ordered:
            return
        if self._workers.fork_server.forks:
            self._start()
        else:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._start)

    def _start(self) -> None:
        listener = self._listener
        if listener is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        if self._ordered or self._over.is_set():
            return
        self._ordered = True
        fork_server = self._workers.fork_server
        order = fork_servers.store_order(fork_server, self._plan, self._plan.group.master_port)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = self._folder.open_log(_LOG)
        with self._open_link() as theirs, contextlib.suppress(OSError):
            fork_server.send(order, [nowhere, log, log, listener.fileno(), theirs.fileno()])
        for fd in (nowhere, log):
            os.close(fd)
        if self._watch is None:
            self._watch = loop.create_task(self._watch_liveness())

    def _open_link(self) -> socket.socket:
        """Return the store's end of a new socket to it."""
        self._close_link()
        self._liveness = Liveness(self._plan.recovery.worker_timeout, start=liveness.IMPORT_TIMEOUT)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._receive, self._link)
        return theirs

    def _receive(self, link: socket.socket) -> None:
        try:
            data = link.recv(_MESSAGE)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:  # the store has ended: its exit is also reported
            self._close_link()
            return
        match message := json.loads(data):
            case {"is": "heartbeat"}:
                self._liveness.record_answer()
                self._failed_starts = 0
            case {"is": "refused"}:
                self._note(f"the store refused a connection of {message['who']}: only ranks of this run may connect")
            case {"is": "ask"}:
                task = asyncio.get_running_loop().create_task(self._ask(link, message))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            case {"is": "open"}:
                self._note(f"anyone who reaches its port can connect to the store: {message['why']}")

    async def _ask(self, link: socket.socket, message: wire.Message) -> None:
        """Answer the store whether a process of another node may connect."""
        near, far = (str(message["near"][0]), message["near"][1]), (str(message["far"][0]), message["far"][1])
        admitted = self._peers is not None and await self._peers.admits(near, far)
        with contextlib.suppress(OSError):  # the store has ended
            answer = json.dumps({"number": message["number"], "admitted": admitted}).encode("ascii")
            await asyncio.get_running_loop().sock_sendall(link, answer)

    def _close_link(self) -> None:
        if self._link is not None:
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self._link.close()
            self._link = None

    async def _watch_liveness(self) -> None:
        while True:
            await asyncio.sleep(liveness.INTERVAL)
            if self._pid and (why := self._liveness.look(linux.state(self._pid))):
                self._kill(why)

    def kill_if_stopped(self) -> None:
        """Replace a stopped store now instead of after a while: a group forms, or the workers end."""
        if self._pid and linux.state(self._pid) == "stopped":
            self._kill("stopped")

    def _kill(self, why: str) -> None:
        self._note(f"the store process does not answer ({why}): SIGKILL")
        self._workers.send_signal(NAME, signal.SIGKILL)

    @property
    def _log(self) -> str:
        return f"{self._folder.path}/{_LOG}"

    def started(self, pid: int) -> None:
        """Record the pid of the store."""
        self._pid = pid

    def exited(self, pid: int, code: int) -> bool:
        """Replace the store. Without it no group can form, but an existing group continues.

        False: it is not the current store.
        """
        if pid != self._pid:
            return False
        self._folder.event(events.StoreLost(time=time.time(), code=code))
        self._failed_starts = 0 if self.answers else self._failed_starts + 1
        self._pid, self._ordered = 0, False
        delay, ended = store_delay(self._failed_starts), f"the store process ended ({root_cause.in_words(code)})"
        if delay:
            count = f"{self._failed_starts} in a row ended before they had answered"
            self._note(f"{ended}; {count}; another is started in {delay:.0f} s; see {self._log}")
            self._restart = asyncio.get_running_loop().call_later(delay, self._start)
        else:
            self._note(f"{ended}; replaced by a new, empty one")
            self._start()
        return True

    def move(self, plan: Plan, listener: socket.socket | None) -> None:
        """Apply a new plan: stop or start the store if another node hosts it from now on or hosted it before."""
        before, self._plan, self._listener = self._listener, plan, listener
        if listener is before:
            self.kill_if_stopped()
            return
        if before is not None:
            asyncio.get_running_loop().remove_reader(before.fileno())
            if self._ordered:
                self._workers.send_signal(NAME, signal.SIGKILL)  # it ignores the others, and has nothing to clean up
        self._pid, self._ordered = 0, False
        self.prepare()

    def fork_server_lost(self, *, adopts: bool) -> None:
        """Keep the store if it outlives its fork server, as a child of this process. Otherwise it has ended with it."""
        if not adopts or not self._pid or not self._workers.adopted.adopt(NAME, self._pid):
            self._pid, self._ordered = 0, False
        self.kill_if_stopped()  # its fork server may have been stopped, too, and so did not kill it

    def use_fork_server(self) -> None:
        """Order the store from the fork server that replaces a lost one, unless it has outlived that."""
        if not self._pid:  # what was ordered meanwhile is lost
            self._ordered = False
        self.prepare()

    def close(self) -> None:
        """Kill a store that has outlived its fork server. Stop waiting for a connection that would start the store."""
        self._workers.adopted.send_signal(NAME, signal.SIGKILL, alone=True)
        self._pid = 0
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._close_link()
        for task in (self._watch, self._restart, *self._asking):
            if task is not None:
                task.cancel()
