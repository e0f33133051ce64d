"""The terminal of `phalanx run`, while the debugger of a rank has it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from phalanx.launch.console import Console
from phalanx.launch.filters import Std
from phalanx.launch.zygote.witness.terminal import LEAVE


class Keyboard:
    """It stays as it is: the terminal itself edits lines and shows what is typed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.rank: int | None = None  # who has it

    @property
    def there(self) -> bool:
        """We have a terminal, and in front: one that runs in the background gets nothing of what is typed."""
        with contextlib.suppress(OSError):
            return os.isatty(0) and self._console.terminal(Std.OUT) and os.tcgetpgrp(0) == os.getpgrp()
        return False

    async def lend(self, rank: int, sock: socket.socket, catch_up: Callable[[], None]) -> None:
        """Until the debugger is through. `catch_up`: what the rank has printed before comes before."""
        loop = asyncio.get_running_loop()
        screen = _Screen(self._console, catch_up)
        transport, _ = await loop.create_unix_connection(lambda: screen, sock=sock)
        self.rank = rank
        self._console.lend(rank)

        def typed() -> None:
            try:
                data = os.read(0, 4096)
            except BlockingIOError:
                return
            except OSError:  # it is gone
                data = b""
                loop.remove_reader(0)
            self._console.typed()
            transport.write(data or LEAVE.encode())

        loop.add_reader(0, typed)
        try:
            await screen.ended.wait()
        finally:
            loop.remove_reader(0)
            transport.close()
            self.rank = None
            self._console.lend(None)


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
