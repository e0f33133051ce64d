"""The screen of `phalanx run --screen`: a process of its own that has our terminal, while our console is hidden.

It goes when the run does, or before: somebody leaves it (q), or it dies. Then the terminal is as it was, and the
console shows what comes from then on.
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

from phalanx.launch.output.console import Console
from phalanx.launch.output.sink import Attributes, attributes, restore
from phalanx.launch.plan import Plan
from phalanx.launch.runs.root_cause import in_words

_LAST_LOOK = 8.0  # seconds for the last state to be seen: it takes one, and a slow machine longer
_ENDING = 3.0  # seconds for a screen that was told to end


def here(plan: Plan) -> bool:
    """Where there are several nodes: on the one that leads."""
    return plan.rendezvous is None or bool(plan.rendezvous.leads)


def possible(plan: Plan) -> bool:
    """There is a terminal, it can do that, and it is ours to read from."""
    with contextlib.suppress(OSError):
        if os.isatty(0) and os.isatty(1) and plan.environ.get("TERM", "") not in ("", "dumb", "unknown"):
            return os.tcgetpgrp(0) == os.getpgrp()
    return False


class TerminalProcess:
    def __init__(self, run: str, console: Console, note: Callable[[str], None]) -> None:
        self._run = run
        self._console = console
        self._note = note
        self._process: subprocess.Popen[bytes] | None = None
        self._handle = -1
        self._as_it_was: Attributes | None = None
        self._gone = asyncio.Event()
        self._ends = False  # because we say so

    @property
    def pids(self) -> frozenset[int]:
        return frozenset((self._process.pid,)) if self._process is not None else frozenset()

    async def begin(self) -> None:
        """What was said before stays on the terminal, above."""
        await asyncio.to_thread(self._console.hide)
        self._as_it_was = attributes((0, 1))
        words = [sys.executable, "-P", "-m", "phalanx", "watch", "--held", str(os.getpid()), self._run]
        # Until it can take a Ctrl-C, that is ours alone: it finds the signal blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(words)
            self._handle = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._console.show()
            self._note(f"there is no screen: {error.strerror}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        asyncio.get_running_loop().add_reader(self._handle, self._ended)

    def _ended(self) -> None:
        if self._process is None or self._gone.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        code = self._process.wait()
        if code < 0 and attributes((0, 1)) != self._as_it_was:  # it could not tidy up
            from phalanx.watch.screen.terminal import LEAVE

            ready = select.poll()
            ready.register(1, select.POLLOUT)
            with contextlib.suppress(OSError):
                if ready.poll(0):  # never wait for a connection that is stuck
                    os.write(1, LEAVE)
        restore(self._as_it_was)
        self._gone.set()
        self._console.show()
        if code and not self._ends:
            self._note(f"the screen has ended ({in_words(code)}); what ranks print is shown from here on")

    async def end(self) -> None:
        """The run is over, and the screen knows: it shows the end for a moment. Then the terminal is ours.

        One that is not to be seen, or not yet, has nothing to show: a run that ends at once does not wait for it.
        """
        if self._process is None or self._gone.is_set():
            return
        look = _LAST_LOOK if attributes((0, 1)) != self._as_it_was else 0.0
        for number, patience in ((None, look), (signal.SIGTERM, _ENDING), (signal.SIGKILL, _ENDING)):
            if number is not None:
                self._ends = True
                self._process.send_signal(number)
                self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._gone.wait()
                return
