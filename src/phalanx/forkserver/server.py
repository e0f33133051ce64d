"""The main loop of the fork server: starts children on request, reports exits, and ends all children with the agent.

One thread, one poll. `serve` returns only in a child that becomes a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import Any

from . import linux, wire
from .child import cuda, finalization, setup, teardown
from .imports import preload, shadows
from .imports.restart import FreshStart
from .orphans import Orphans
from .probe import probe


class ForkServer:
    """Serves an agent over a socket: ForkServer(sock).serve().

    `parent`: a pidfd of the process at the other end, for a server that is a plain fork of it. Other forks of that
    process may hold its end of the socket, so the end of the connection alone does not show that it has ended.
    """

    def __init__(self, sock: socket.socket, parent: int | None = None) -> None:
        self._sock = sock
        self._parent = parent
        self._children: dict[int, str] = {}  # pid -> name that the agent uses
        self._store: int | None = None
        self._orphan_cleanup = Orphans()
        self._signals: list[int] = []
        self._dispositions: dict[int, Any] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> dict[str, Any]:
        """Serve the agent until it ends. Returns the spec, only in a child that becomes a worker."""
        setup.default_signals()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A scheduler signals every process of a job. The fork server ends only with its connection, or by SIGKILL.
        for number in setup.SCHEDULER_SIGNALS:
            self._dispositions[number] = signal.signal(number, lambda number, _: self._signals.append(number))
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        linux.adopt_orphans()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        if self._parent is not None:
            poll.register(self._parent, select.POLLIN)
        while True:
            self._reap()
            ready = {fd for fd, _ in poll.poll()}
            if self._parent in ready:
                self._end()
            if self._wake_read in ready:
                os.read(self._wake_read, 512)
                while self._signals:
                    self._send({"is": "signalled", "signal": self._signals.pop(0)})
            if self._sock.fileno() in ready:
                received = wire.receive(self._sock)
                if received is None:
                    self._end()  # the agent has ended, for any reason
                else:
                    request, fds = received
                    if self._handle(request, fds):
                        return request

    def _handle(self, request: dict[str, Any], fds: list[int]) -> bool:
        """Handle one request. Return True in a child that becomes a worker."""
        match request["do"]:
            case "import":
                report = preload.preload(request["required"], request["optional"], request["path0"])
                teardown.keep_operators()
                preload.modules.hide()
                # From here on the end of the connection shows that the agent has ended. That leaves time to end the
                # processes that workers have started; a parent-death signal would not.
                linux.die_with_parent(0, 0)
                self._send({"is": "ready", "pid": os.getpid(), **report})
            case "start" | "store":
                return self._start(request, fds)
            case "signal":
                self._signal(request["name"], request["signal"], alone=request.get("alone", False))
            case "ping":
                self._send({"is": "pong"})
            case "end_orphans":
                self._children.clear()
                self._end_store()
                self._orphan_cleanup.end()
                self._send({"is": "orphans_ended", "id": request.get("id", 0)})
            case "orphans":
                self._send({"is": "orphans", "id": request.get("id", 0), "pids": self._orphans()})
            case "end":
                self._end(**{name: request[name] for name in ("leave", "patience", "grace") if name in request})
        return False

    def _start(self, request: dict[str, Any], fds: list[int]) -> bool:
        parent = os.getpid()
        # Block signals: one that arrives before the child is set up would go to the fork server's handler and be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, setup.SCHEDULER_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory: the agent reports it, and ends the others
            self._send({"is": "refused", "name": request["name"], "why": str(error)})
            pid = -1
        if pid == 0:
            return self._child(request, fds, setup.Parent(parent, self._dispositions, mask))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._children[pid] = request["name"]
            if request["do"] == "store":
                self._store = pid
            self._send({"is": "started", "name": request["name"], "pid": pid})
        return False

    def _child(self, request: dict[str, Any], fds: list[int], parent: setup.Parent) -> bool:
        """Set up a child; exit if that fails, so that it becomes nothing else."""
        try:
            self._sock.close()
            for fd in (self._wake_read, self._wake_write, self._parent):
                if fd is not None:
                    os.close(fd)
            setup.detach(request, fds, parent)
            return self._run_child(request, fds)
        except KeyboardInterrupt:  # stopped before it has begun: end in the same way as a moment later
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(128 + signal.SIGINT)
        except BaseException as error:  # on any error: this child must not return
            message = f"phalanx: this process could not be set up: {error!r}\n".encode()
            try:
                os.write(fds[2], message)
            except OSError:  # already moved to standard error
                os.write(2, message)
            os._exit(70)

    def _run_child(self, request: dict[str, Any], fds: list[int]) -> bool:
        """Turn this child into a store, another program, or a worker (returns True)."""
        if request["do"] == "store":
            # The store must live while a worker uses its grace period.
            for number in setup.SCHEDULER_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        if request["do"] == "store" and request.get("exec"):
            listener, agent = fds[3:]
            for fd in (listener, agent):
                os.set_inheritable(fd, True)
            request["exec"] += [str(listener), str(agent), json.dumps(request["store"])]
        elif request["do"] == "store":
            from .store import host  # here, not above: its imports must not be visible to scripts

            watcher = fds[4] if len(fds) > 4 else None  # a caller of `spawn` does not watch its store
            host.host(fds[3], watcher, host.StoreOrder(**request["store"]))
            os._exit(0)  # the agent has ended
        if request.get("exec"):
            for fd in fds[:3]:
                os.close(fd)
            if request.get("hook") and request.get("probe") is not None:
                setup.add_probe_hook(request, fds[3:])
            setup.execute(request)
        for fd in fds[:3]:
            os.close(fd)
        setup.apply_spec(request)
        if request.get("cuda") is not None:
            cuda.open_context(request["cuda"])
        kept: list[int] = []
        if request.get("probe") is None:
            request["inherited"] = fds[3:]
        else:
            board, channel, stacks = fds[3:]
            kept = probe.begin(board, request["probe"], channel, stacks)
        # From here on an import may find a module of the script. Then no preload hints are recorded.
        if not shadows.unshadow(request.get("path0")) and request.get("hints"):
            preload.record_hints(request["hints"])
        preload.modules.begin(frozenset(request.get("assumed", ())), FreshStart(request, kept))
        if request.get("kept"):
            from .imports import kept_sources

            kept_sources.install(request)
        finalization.begin(preload.modules.abandon)
        return True

    def _signal(self, name: str, number: int, *, alone: bool = False) -> None:
        """Signal a child, or its whole group. The agent cannot do this: only the process that reaps knows whether a pid
        is still valid.
        """
        self._orphan_cleanup.note()
        for pid, known in self._children.items():
            if known == name:
                with contextlib.suppress(ProcessLookupError):
                    if alone:
                        os.kill(pid, number)
                        continue
                    try:
                        os.killpg(pid, number)
                    except ProcessLookupError:  # it has no session yet
                        os.kill(pid, number)
                    if number != signal.SIGWINCH:
                        os.killpg(pid, signal.SIGCONT)  # a stopped process would not run its handler

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._orphan_cleanup.note(pid)
            name = self._children.pop(pid, None)
            if pid == self._store:
                self._store = None
            if name is not None:
                report = {"is": "exited", "name": name, "pid": pid, "status": status, "time": time.time()}
                self._send({**report, "peak": usage.ru_maxrss * 1024})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            wire.send(self._sock, message)
        except OSError:
            self._end()

    def _orphans(self) -> list[int]:
        """Return the processes that workers have left running. Call it only after the last attempt: it ends the
        store.
        """
        self._end_store()
        self._reap()
        return [] if linux.childless() else linux.descendants(os.getpid())

    def _end_store(self) -> None:
        """Kill the store, which has nothing to clean up."""
        if self._store is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._store, 0)
            self._children.pop(self._store, None)
            self._store = None

    def _end(self, *, leave: bool = False, patience: float = 0.0, grace: float = linux.GRACE) -> None:
        """Exit, after ending all descendants, also those in other sessions.

        With `leave`, processes that workers have started keep running, as children of the next reaper. Otherwise they
        have `patience` seconds to end by themselves, then get SIGTERM, and `grace` seconds later SIGKILL.
        """
        signal.set_wakeup_fd(-1)
        self._end_store()
        left = list(self._orphan_cleanup.leave()) if leave else self._orphan_cleanup.end(patience=patience, grace=grace)
        with contextlib.suppress(OSError):
            wire.send(self._sock, {"is": "ended", "left": left})
        os._exit(0)
