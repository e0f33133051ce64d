"""The fork server's loop: start a child when told, say when one has ended, leave none behind.

One thread, one poll. `serve` returns in a child that is to go on as a worker, and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import Any

from . import linux, store, wire
from .child import cuda, finalization, setup, teardown
from .imports import preload, shadows
from .imports.restart import FreshStart
from .orphans import Orphans
from .probe import probe


class ForkServer:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._children: dict[int, str] = {}  # pid -> the name the agent knows it by
        self._store: int | None = None
        self._leftovers = Orphans()
        self._heard: list[int] = []
        self._dispositions: dict[int, Any] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> dict[str, Any]:
        """Obey the agent until it is gone. Returns the order only in a child that is to become a worker."""
        setup.default_signals()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A scheduler signals every process of a job. What ends us is the end of the connection, or SIGKILL.
        for number in setup.SCHEDULERS:
            self._dispositions[number] = signal.signal(number, lambda number, _: self._heard.append(number))
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        linux.adopt_orphans()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            self._reap()
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_read in ready:
                os.read(self._wake_read, 512)
                while self._heard:
                    self._tell({"is": "signalled", "signal": self._heard.pop(0)})
            if self._sock.fileno() in ready:
                received = wire.receive(self._sock)
                if received is None:
                    self._end()  # the agent is gone, however it went
                else:
                    order, fds = received
                    if self._obey(order, fds):
                        return order

    def _obey(self, order: dict[str, Any], fds: list[int]) -> bool:
        """Carry out one order; true in a child that is to become a worker."""
        match order["do"]:
            case "import":
                report = preload.preload(order["required"], order["welcome"], order["path0"])
                teardown.keep_operators()
                # From here on the end of the connection tells us that the agent is gone, and leaves us the
                # time to end what the workers have started; a parent-death signal would not.
                linux.die_with_parent(0, 0)
                self._tell({"is": "ready", "pid": os.getpid(), **report})
            case "start" | "store":
                return self._start(order, fds)
            case "signal":
                self._signal(order["name"], order["signal"], alone=order.get("alone", False))
            case "sweep":
                self._children.clear()
                self._end_store()
                self._leftovers.end()
                self._tell({"is": "swept"})
            case "orphans":
                self._tell({"is": "orphans", "pids": self._orphans()})
            case "end":
                self._end(leave=order.get("leave", False))
        return False

    def _start(self, order: dict[str, Any], fds: list[int]) -> bool:
        parent = os.getpid()
        # What comes before the child is itself would be taken for the fork server's own, and forgotten.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, setup.SCHEDULERS)
        try:
            pid = os.fork()
        except OSError as error:  # no process or no memory left: the agent tells, and ends the others
            self._tell({"is": "refused", "name": order["name"], "why": str(error)})
            pid = -1
        if pid == 0:
            return self._child(order, fds, setup.Parent(parent, self._dispositions, mask))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._children[pid] = order["name"]
            if order["do"] == "store":
                self._store = pid
            self._tell({"is": "born", "name": order["name"], "pid": pid})
        return False

    def _child(self, order: dict[str, Any], fds: list[int], parent: setup.Parent) -> bool:
        """A child that cannot become what it is to be, must not become anything else."""
        try:
            self._sock.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            setup.settle(order, fds, parent)
            return self._become(order, fds)
        except KeyboardInterrupt:  # told to stop before it had begun: it ends as it would have a moment later
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(128 + signal.SIGINT)
        except BaseException as error:
            told = f"phalanx: this process could not be set up: {error!r}\n".encode()
            try:
                os.write(fds[2], told)
            except OSError:  # it has been made standard error by now
                os.write(2, told)
            os._exit(70)

    def _become(self, order: dict[str, Any], fds: list[int]) -> bool:
        """In the child."""
        if order["do"] == "store":
            # It has to be there as long as any worker makes use of the grace that it was given.
            for number in setup.SCHEDULERS:
                signal.signal(number, signal.SIG_IGN)
        if order["do"] == "store" and order.get("exec"):
            os.set_inheritable(fds[3], True)
            order["exec"] += [str(fds[3]), order["address"], str(order["port"])]
        elif order["do"] == "store":
            store.host(fds[3], order["address"], order["port"])
        if order.get("exec"):
            for fd in fds[:3]:
                os.close(fd)
            if order.get("hook") and order.get("probe") is not None:
                setup.hook(order, fds[3:])
            setup.execute(order)
        for fd in fds[:3]:
            os.close(fd)
        setup.dress(order)
        if order.get("cuda") is not None:
            cuda.open_context(order["cuda"])
        kept: list[int] = []
        if order.get("probe") is not None:
            board, channel, stacks = fds[3:]
            kept = probe.begin(board, order["probe"], channel, stacks)
        # From here on an import may find a module of the script's own: the lesson is not noted then.
        if not shadows.uncover(order.get("path0")) and order.get("lesson"):
            preload.note_lesson(order["lesson"])
        preload.modules.hide(frozenset(order.get("assumed", ())), FreshStart(order, kept))
        finalization.begin(preload.modules.abandon)
        return True

    def _signal(self, name: str, number: int, *, alone: bool = False) -> None:
        """To the child, or its whole group. Not by the agent: only who reaps knows whose a pid still is."""
        self._leftovers.note()
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
                        os.killpg(pid, signal.SIGCONT)  # a stopped process would never get to its handler

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._leftovers.note(pid)
            name = self._children.pop(pid, None)
            if pid == self._store:
                self._store = None
            if name is not None:
                self._tell({"is": "exited", "name": name, "pid": pid, "status": status, "peak": usage.ru_maxrss * 1024})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            wire.send(self._sock, message)
        except OSError:
            self._end()

    def _orphans(self) -> list[int]:
        """What workers have left running. Only after the last attempt: it ends the store."""
        self._end_store()
        self._reap()
        return [] if linux.childless() else linux.descendants(os.getpid())

    def _end_store(self) -> None:
        """It holds nothing worth a goodbye."""
        if self._store is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._store, 0)
            self._children.pop(self._store, None)
            self._store = None

    def _end(self, *, leave: bool = False) -> None:
        """Nothing is left behind: not what a worker started in a session of its own either.

        With `leave`, what workers have started goes on, as a child of whoever reaps next.
        """
        signal.set_wakeup_fd(-1)
        self._end_store()
        left = list(self._leftovers.leave()) if leave else self._leftovers.end()
        with contextlib.suppress(OSError):
            wire.send(self._sock, {"is": "ended", "left": left})
        os._exit(0)
