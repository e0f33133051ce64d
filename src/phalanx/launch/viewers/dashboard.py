"""Those who look at the run in a browser: we only listen, and a child of ours serves them, once somebody calls.
Who wants to see it on our own terminal has another child (screening.py).

A page that nobody opens costs no process, and not even an import. The child ends with the run, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import PAGE_KEY
from phalanx.errors import PortError
from phalanx.launch.output.console import Console
from phalanx.launch.output.filters import Std
from phalanx.launch.plan import Plan
from phalanx.launch.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from phalanx.launch.viewers.terminal import TerminalProcess
    from phalanx.watch.page.address import PageAddress

_FILE = "page"  # in the run folder, for its owner alone: the address, and the key
_LOG = "page.log"
_MOST = 3  # times that a page's server is started: one that cannot live would be started for ever
_BY_ITSELF = 5.0  # seconds for a child to tell the end of the run, and go
_POLITELY = 1.0  # seconds after SIGTERM


class DashboardProcess:
    """The page's server. `gone` is called when it has ended."""

    def __init__(self, words: Sequence[str], listener: int, log: int, gone: Callable[[], None]) -> None:
        self._gone = gone
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx", "watch", "--held", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener],
            process_group=0,  # Ctrl-C ends the run, and not before that what shows how it ends
        )
        self.pid = self._process.pid
        try:
            self._handle = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._handle, self._exited)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self._process.wait()
        self._ended.set()
        self._gone()

    async def end(self) -> None:
        """By itself, then politely, then surely."""
        for number, wait in ((None, _BY_ITSELF), (signal.SIGTERM, _POLITELY), (signal.SIGKILL, None)):
            if self._ended.is_set():
                return
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), wait)


class Dashboard:
    def __init__(self, plan: Plan, folder: RunFolder, console: Console) -> None:
        self._plan = plan
        self._folder = folder
        self._console = console
        self._listener: socket.socket | None = None
        self._page: DashboardProcess | None = None
        self._screening: TerminalProcess | None = None
        self._pages = 0  # that were started
        self._ends = False

    @property
    def pids(self) -> frozenset[int]:
        """Children that are not for anybody else to end."""
        page = frozenset((self._page.pid,)) if self._page is not None else frozenset()
        return page | self._screening.pids if self._screening is not None else page

    def begin(self, *, leads: bool) -> None:
        """Raises UsageError: a port that is taken, a key that is none."""
        if leads and self._wanted:
            self.page()

    async def screen(self, note: Callable[[str], None]) -> None:
        """On this terminal, where it was asked for and can be."""
        if not self._plan.viewers.screen:
            return
        from phalanx.launch.viewers import terminal

        if terminal.here(self._plan):
            if terminal.possible(self._plan):
                self._screening = terminal.TerminalProcess(self._folder.path, self._console, note)
                await self._screening.begin()
            else:
                note("--screen needs a terminal, and in front; this is as without it")

    @property
    def _wanted(self) -> bool:
        told = self._plan.viewers.page
        if told is not None:
            return told
        here = self._console.terminal(Std.ERR) and not self._plan.output.quiet
        return here and self._plan.rendezvous is None and not self._plan.viewers.screen

    def page(self) -> None:
        from phalanx.watch.page import address, keys

        where = address.parse(self._plan.viewers.page_at)
        key = keys.new(environment().get(PAGE_KEY, ""))
        try:
            self._listener = address.listen(where)
        except PortError:
            if self._plan.viewers.page is None:  # nobody has asked for it
                return
            raise
        link = address.link(where, self._listener, key)
        try:
            fd = os.open(self._path(_FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                json.dump({"address": link.partition("#")[0], "key": key}, file)
        except OSError as error:  # a full disk
            self._no_page(f"{self._path(_FILE)} cannot be written: {error.strerror}")
            return
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._called)
        # Said, and not noted: the key is in no file that is shown to others.
        self._console.say(self._announcement(where, link, self._listener.getsockname()))

    def _announcement(self, where: PageAddress, link: str, bound: tuple[Any, ...]) -> str:
        if not where.loopback:
            return f"see {link}\n  {where.warning}"
        if not self._plan.environ.get("SSH_CONNECTION"):
            return f"see {link}"
        gathering = self._plan.rendezvous
        host = gathering.names[0] if gathering is not None and gathering.names else "localhost"
        if replace(where, host=host.rpartition("@")[2]).loopback:
            host = os.uname().nodename
            with contextlib.suppress(KeyError):  # in a container users may have no name
                host = f"{pwd.getpwuid(os.getuid()).pw_name}@{host}"
        address, port = bound[:2]
        address = f"[{address}]" if ":" in address else address
        return f"see {link}\n  from your own machine, after: ssh -N -L {port}:{address}:{port} {host}"

    def _called(self) -> None:
        """Somebody wants to see it. Whoever it is waits until there is one that accepts."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._ends:
            return
        self._pages += 1
        words = [self._folder.path, "--page-fd", str(self._listener.fileno())]
        if self._plan.viewers.page_at is not None:
            words += ["--page-at", self._plan.viewers.page_at]
        try:
            log = os.open(self._path(_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self._page = DashboardProcess(words, self._listener.fileno(), log, self._gone)
            finally:
                os.close(log)
        except OSError as error:
            self._no_page(str(error))

    def _gone(self) -> None:
        """At the next call another one is started."""
        self._page = None
        if self._ends or self._listener is None:
            return
        if self._pages < _MOST:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._called)
        else:
            self._no_page(f"its server has ended {_MOST} times; see {self._path(_LOG)}")

    def _no_page(self, why: str) -> None:
        self._console.say(f"there is no page: {why}\n  phalanx watch {self._folder.name} --page makes another")
        self._close()

    def _close(self) -> None:
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        with contextlib.suppress(OSError):
            os.unlink(self._path(_FILE))
        with contextlib.suppress(OSError):
            if not os.path.getsize(self._path(_LOG)):
                os.unlink(self._path(_LOG))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder.path, name)

    async def end(self) -> None:
        """The run is over, and whoever looks has been told."""
        self._ends = True
        await asyncio.gather(*(one.end() for one in (self._page, self._screening) if one is not None))
        self._close()


def key_of(folder: str) -> str:
    """Of the page of a run, for its own child."""
    with open(os.path.join(folder, _FILE)) as file:
        return str(json.load(file)["key"])
