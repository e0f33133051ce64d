"""Lends the terminal of `phalanx run` to the debugger of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from phalanx.forkserver.debug.terminal import LEAVE
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.filters import Std

_RECHECK = 0.3  # seconds until the next check whether we are in the foreground


class TtyLease:
    """Passes keys to the debugger and its output to the terminal. The terminal stays in line mode, with echo."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.rank: int | None = None  # the rank that has the terminal

    @property
    def available(self) -> bool:
        """Return whether there is a terminal and we are in the foreground: only then can we read keys."""
        return self._console.terminal(Std.OUT) and not self._console.hidden and _in_foreground()

    async def lend(self, rank: int, sock: socket.socket, catch_up: Callable[[], None]) -> None:
        """Lend the terminal until the debugger ends. `catch_up` shows earlier output of the rank."""
        loop = asyncio.get_running_loop()
        screen = _Screen(self._console, catch_up)
        transport, _ = await loop.create_unix_connection(lambda: screen, sock=sock)
        self.rank = rank
        self._console.lend(rank)
        keys = _open_tty()
        waits: asyncio.TimerHandle | None = None

        def listen() -> None:
            loop.add_reader(keys, typed)

        def typed() -> None:
            nonlocal waits
            if not _in_foreground():
                loop.remove_reader(keys)
                if os.isatty(keys):  # Ctrl-Z, bg: keys are the shell's, and reading would stop us
                    waits = loop.call_later(_RECHECK, listen)
                else:  # the terminal is closed; the rank waits for another one
                    transport.close()
                return
            try:
                data = os.read(keys, 4096)
            except BlockingIOError:  # a rank whose stdin is this terminal has read it
                return
            except OSError:
                loop.remove_reader(keys)
                transport.close()
                return
            self._console.typed()
            transport.write(data or LEAVE.encode())

        listen()
        try:
            await screen.ended.wait()
        finally:
            if waits is not None:
                waits.cancel()
            loop.remove_reader(keys)
            if keys:
                os.close(keys)
            transport.close()
            self.rank = None
            self._console.lend(None)


def _in_foreground() -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    return False


def _open_tty() -> int:
    """Open the terminal again, so that O_NONBLOCK does not affect other processes that read from it."""
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(0), os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    return 0


class _Screen(asyncio.Protocol):
    def __init__(self, console: Console, catch_up: Callable[[], None]) -> None:
        self.ended = asyncio.Event()
        self._console = console
        self._catch_up = catch_up

    def data_received(self, data: bytes) -> None:
        self._catch_up()
        self._console.debugger(data)

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()
