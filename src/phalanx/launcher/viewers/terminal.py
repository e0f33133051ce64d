"""The screen of `phalanx run --screen`: a child process that has the terminal while the console is hidden.

It ends with the run, or earlier if the user leaves it (q) or it crashes. Then the terminal is restored, and the console
shows all further output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.sink import Attributes, attributes, restore
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.root_cause import in_words

_LAST_STATE = 8.0  # seconds to show the last state: usually one, on a slow host more
_EXIT_TIMEOUT = 3.0  # seconds after a signal


def here(plan: Plan) -> bool:
    """Return whether the screen belongs on this node: with several nodes, on the leader."""
    return plan.rendezvous is None or bool(plan.rendezvous.leads)


def possible(plan: Plan) -> bool:
    """Return whether there is a capable terminal and we are in its foreground."""
    with contextlib.suppress(OSError):
        if os.isatty(0) and os.isatty(1) and plan.environ.get("TERM", "") not in ("", "dumb", "unknown"):
            return os.tcgetpgrp(0) == os.getpgrp()
    return False


class TerminalProcess:
    """The child process that shows the screen."""

    def __init__(self, run: str, console: Console, note: Callable[[str], None]) -> None:
        self._run = run
        self._console = console
        self._note = note
        self._process: subprocess.Popen[bytes] | None = None
        self._handle = -1
        self._saved: Attributes | None = None
        self._exited = asyncio.Event()
        self._ending = False  # we requested it

    @property
    def pids(self) -> frozenset[int]:
        """Return the pid of the process, if it was started."""
        return frozenset((self._process.pid,)) if self._process is not None else frozenset()

    async def start(self) -> None:
        """Hide the console and start the screen. What was printed before stays on the terminal, above."""
        await asyncio.to_thread(self._console.hide)
        self._saved = attributes((0, 1))
        words = [sys.executable, "-P", "-m", "phalanx", "watch", "--held", str(os.getpid()), self._run]
        # The child starts with SIGINT blocked, so that Ctrl-C is ours until it can handle it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(words)
            self._handle = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._console.show()
            self._note(f"cannot start the screen: {error.strerror}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        asyncio.get_running_loop().add_reader(self._handle, self._on_exit)

    def _on_exit(self) -> None:
        if self._process is None or self._exited.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        code = self._process.wait()
        if code < 0 and attributes((0, 1)) != self._saved:  # it could not restore the terminal
            from phalanx.watch.screen.terminal.terminal import LEAVE

            ready = select.poll()
            ready.register(1, select.POLLOUT)
            with contextlib.suppress(OSError):
                if ready.poll(0):  # never block on a stuck connection
                    os.write(1, LEAVE)
        restore(self._saved)
        self._exited.set()
        self._console.show()
        if code and not self._ending:
            self._note(f"the screen ended ({in_words(code)}); output is shown here from now on")

    async def end(self) -> None:
        """Let the screen show the end of the run for a moment, then end it. Do not wait if it is not visible."""
        if self._process is None or self._exited.is_set():
            return
        visible = _LAST_STATE if attributes((0, 1)) != self._saved else 0.0
        for number, timeout in ((None, visible), (signal.SIGTERM, _EXIT_TIMEOUT), (signal.SIGKILL, _EXIT_TIMEOUT)):
            if number is not None:
                self._ending = True
                self._process.send_signal(number)
                self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._exited.wait()
                return
