"""The terminal of `phalanx run`, and the ranks at breakpoints that wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from phalanx.contract import events
from phalanx.launcher.debug.attachment import Attachment, AttachRefused
from phalanx.launcher.debug.debugged_ranks import DebugTarget
from phalanx.launcher.debug.tty_lease import TtyLease
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.runs.run_folder import RunFolder


class TerminalQueue:
    """Gives the terminal to ranks at breakpoints, one at a time. `attach` attaches it to a waiting rank."""

    def __init__(
        self, target: DebugTarget, console: Console, folder: RunFolder, attach: Callable[[int], Awaitable[Attachment]]
    ) -> None:
        self._target = target
        self._console = console
        self._folder = folder  # its name changes when the nodes have joined
        self._attach = attach
        self._tty = TtyLease(console)
        self._waiting: list[tuple[int, str]] = []  # rank and place
        self._unresponsive = False  # the rank that has the terminal cannot be interrupted
        self._task: asyncio.Task[None] | None = None

    @property
    def holder(self) -> int | None:
        """Return the rank that has the terminal, if it can be interrupted."""
        return None if self._unresponsive else self._tty.rank

    def offer(self, rank: int, place: str, *, reachable: bool) -> None:
        """Give the terminal to a rank at a breakpoint, or print how to attach to it."""
        if not self._tty.available or not reachable:
            self._say_how_to_attach(rank, place)
            return
        if any(rank == other for other, _ in self._waiting[1:]):
            return
        if self._waiting:
            self._console.say(f"rank {rank} waits at a breakpoint, {place}, until the terminal is free")
        self._waiting.append((rank, place))
        if len(self._waiting) == 1:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    def interrupt_failed(self, rank: int) -> None:
        """Leave Ctrl-C to the run: the rank cannot be interrupted."""
        if self._tty.rank == rank and not self._unresponsive:
            self._unresponsive = True
            self._console.say(
                f"rank {rank} is in native code and cannot be interrupted; press Ctrl-C again to end the run"
            )

    def close(self) -> None:
        """Take the terminal back."""
        if self._task is not None:
            self._task.cancel()

    def _say_how_to_attach(self, rank: int, place: str) -> None:
        how = f"phalanx attach {rank} {self._folder.name}"
        text = f"rank {rank} waits at a breakpoint, {place}: {how}"
        hint = ", or type its number and d" * self._console.hidden
        self._folder.event(events.NoteEvent(time=time.time(), text=text + hint))
        self._console.say(text)

    async def _serve(self) -> None:
        while self._waiting:
            rank, place = self._waiting[0]
            try:
                if self._tty.available:
                    await self._lend(rank, place)
                else:
                    self._say_how_to_attach(rank, place)
            except (AttachRefused, OSError):  # another user has it, or it has ended
                pass
            finally:
                self._waiting.pop(0)

    async def _lend(self, rank: int, place: str) -> None:
        attached = await self._attach(rank)
        if attached.sock is None:
            return
        self._unresponsive = False
        self._console.say(f"rank {rank} is at a breakpoint, {place}, and has the terminal until it continues (c)")
        attempt = self._target.attempt

        def catch_up() -> None:
            self._unresponsive = False
            if attempt is not None:
                attempt.output.catch_up(rank)

        await self._tty.lend(rank, attached.sock, catch_up)
        attached.hang_up()
