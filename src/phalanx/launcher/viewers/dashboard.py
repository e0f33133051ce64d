"""The viewers that `phalanx run` starts itself: the page in a browser, and the screen on its terminal.

The agent only listens on the port of the page. It starts the process that serves it on the first connection: a page
that is never opened costs no process and no imports. The process ends with the run.
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
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.filters import Std
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from phalanx.launcher.viewers.terminal import TerminalProcess
    from phalanx.watch.page.address import PageAddress

_FILE = "page"  # in the run folder, readable by its owner only: the address and the key
_LOG = "page.log"
_MAX_STARTS = 3  # of the page's process: one that crashes at once would be started forever
_GRACE = 5.0  # seconds to show the end of the run and exit
_TERM_GRACE = 1.0  # seconds after SIGTERM


class DashboardProcess:
    """The child process that serves the page. `on_exit` is called when it has ended."""

    def __init__(self, words: Sequence[str], listener: int, log: int, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx", "watch", "--held", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener],
            process_group=0,  # Ctrl-C is for the run: the page still shows how it ends
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
        self._on_exit()

    async def end(self) -> None:
        """Wait for it to exit, then send SIGTERM, then SIGKILL."""
        for number, wait in ((None, _GRACE), (signal.SIGTERM, _TERM_GRACE), (signal.SIGKILL, None)):
            if self._ended.is_set():
                return
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), wait)


class Dashboard:
    """Starts and ends the page and the screen of a run."""

    def __init__(self, plan: Plan, folder: RunFolder, console: Console) -> None:
        self._plan = plan
        self._folder = folder
        self._console = console
        self._listener: socket.socket | None = None
        self._page: DashboardProcess | None = None
        self._terminal: TerminalProcess | None = None
        self._starts = 0
        self._ending = False

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of the viewer processes, which other code must not end."""
        page = frozenset((self._page.pid,)) if self._page is not None else frozenset()
        return page | self._terminal.pids if self._terminal is not None else page

    def start(self, *, leads: bool) -> None:
        """Open the page, if wanted. Raises UsageError if the port is taken or the key is invalid."""
        if leads and self._wanted:
            self._open_page()

    async def screen(self, note: Callable[[str], None]) -> None:
        """Start the screen on this terminal, if requested and possible."""
        if not self._plan.viewers.screen:
            return
        from phalanx.launcher.viewers import terminal

        if terminal.here(self._plan):
            if terminal.possible(self._plan):
                self._terminal = terminal.TerminalProcess(self._folder.path, self._console, note)
                await self._terminal.start()
            else:
                note("--screen ignored: it needs a terminal, in the foreground")

    @property
    def _wanted(self) -> bool:
        requested = self._plan.viewers.page
        if requested is not None:
            return requested
        here = self._console.terminal(Std.ERR) and not self._plan.output.quiet
        return here and self._plan.rendezvous is None and not self._plan.viewers.screen

    def _open_page(self) -> None:
        from phalanx.watch.page import address, keys

        where = address.parse(self._plan.viewers.page_at)
        key = keys.new(environment().get(PAGE_KEY, ""))
        try:
            self._listener = address.listen(where)
        except PortError:
            if self._plan.viewers.page is None:  # not requested
                return
            raise
        link = address.link(where, self._listener, key)
        try:
            fd = os.open(self._path(_FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                json.dump({"address": link.partition("#")[0], "key": key}, file)
        except OSError as error:  # a full disk
            self._give_up(f"{self._path(_FILE)} cannot be written: {error.strerror}")
            return
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._connected)
        # Printed, not recorded as an event: the key must not be in a file that others may see.
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
            with contextlib.suppress(KeyError):  # in a container the user may have no name
                host = f"{pwd.getpwuid(os.getuid()).pw_name}@{host}"
        address, port = bound[:2]
        address = f"[{address}]" if ":" in address else address
        return f"see {link}\n  from your own computer, after: ssh -N -L {port}:{address}:{port} {host}"

    def _connected(self) -> None:
        """Start the process that accepts the connection."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._ending:
            return
        self._starts += 1
        words = [self._folder.path, "--page-fd", str(self._listener.fileno())]
        if self._plan.viewers.page_at is not None:
            words += ["--page-at", self._plan.viewers.page_at]
        try:
            log = os.open(self._path(_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self._page = DashboardProcess(words, self._listener.fileno(), log, self._page_exited)
            finally:
                os.close(log)
        except OSError as error:
            self._give_up(str(error))

    def _page_exited(self) -> None:
        """Start another process at the next connection."""
        self._page = None
        if self._ending or self._listener is None:
            return
        if self._starts < _MAX_STARTS:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._connected)
        else:
            self._give_up(f"its process ended {_MAX_STARTS} times; see {self._path(_LOG)}")

    def _give_up(self, why: str) -> None:
        self._console.say(f"the page is not available: {why}\n  phalanx watch {self._folder.name} --page opens another")
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
        """End both. Call it after the end of the run was sent to viewers."""
        self._ending = True
        await asyncio.gather(*(one.end() for one in (self._page, self._terminal) if one is not None))
        self._close()


def key_of(folder: str) -> str:
    """Return the key of a run's page."""
    with open(os.path.join(folder, _FILE)) as file:
        return str(json.load(file)["key"])
