"""The terminal of `phalanx run`, while the debugger of a rank has it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from phalanx.forkserver.debug.terminal import LEAVE
from phalanx.launch.output.console import Console
from phalanx.launch.output.filters import Std

_LATER = 0.3  # seconds until it is looked again whether we are in front


class TtyLease:
    """It stays as it is: the terminal itself edits lines and shows what is typed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.rank: int | None = None  # who has it

    @property
    def there(self) -> bool:
        """We have a terminal, and in front: one that runs in the background gets nothing of what is typed."""
        return self._console.terminal(Std.OUT) and not self._console.hidden and _in_front()

    async def lend(self, rank: int, sock: socket.socket, catch_up: Callable[[], None]) -> None:
        """Until the debugger is through. `catch_up`: what the rank has printed before comes before."""
        loop = asyncio.get_running_loop()
        screen = _Screen(self._console, catch_up)
        transport, _ = await loop.create_unix_connection(lambda: screen, sock=sock)
        self.rank = rank
        self._console.lend(rank)
        keys = _opened()
        waits: asyncio.TimerHandle | None = None

        def listen() -> None:
            loop.add_reader(keys, typed)

        def typed() -> None:
            nonlocal waits
            if not _in_front():
                loop.remove_reader(keys)
                if os.isatty(keys):  # Ctrl-Z, bg: what is typed is the shell's, and to read it would stop us
                    waits = loop.call_later(_LATER, listen)
                else:  # it is gone; the rank waits for another one
                    transport.close()
                return
            try:
                data = os.read(keys, 4096)
            except BlockingIOError:  # somebody else has read it: a rank that has this terminal for its input
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


def _in_front() -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    return False


def _opened() -> int:
    """The terminal once more, for us alone: reads that do not wait, whoever else reads from it."""
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
