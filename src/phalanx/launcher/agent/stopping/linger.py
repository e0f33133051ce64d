"""Processes that ranks leave running after a successful run: which they are, and how to wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

SETTLE = 0.5  # seconds for helpers to detect that their parent has ended
_LONGEST = 100  # characters of a command line
_MOST = 8  # processes in a message

# They exit by themselves after their parent, some of them late.
_HELPER_NAMES = ("pt_data_worker", "torch_shm_manag")
_HELPER_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")


@dataclass(frozen=True)
class Orphan:
    """A process that outlived the rank that started it."""

    pid: int
    command: str
    rank: int | None  # None: unknown

    def __str__(self) -> str:
        return f"pid {self.pid}{'' if self.rank is None else f' of rank {self.rank}'}: {self.command}"


class LingeringProcesses:
    """The processes that the ranks of an attempt left running.

    `ask` returns the pids of all processes below the fork server.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[int]]], *, ranks: Mapping[int, int], run: str) -> None:
        self.orphans: list[Orphan] = []
        self.helpers = False  # there are processes, at least helpers
        self._ask = ask
        self._ranks = ranks
        self._run = run
        self._stop = asyncio.Event()

    async def settle(self) -> None:
        """Look for processes, after helpers have had time to end."""
        await self._look()
        if self.orphans:
            await _ended(self.orphans, SETTLE, self._stop)
            await self._look()

    async def wait(self, limit: float) -> bool:
        """Wait until all have ended, including processes that they have started meanwhile. False if that takes longer
        than `limit`.
        """
        end = time.monotonic() + limit
        while self.orphans and await _ended(self.orphans, end - time.monotonic(), self._stop):
            await self._look()
        return not self.orphans or self._stop.is_set()

    def stop(self) -> None:
        """Stop waiting."""
        self._stop.set()

    def text(self, limit: float | None, *, expired: bool = False) -> str:
        """Return what happens to them, now or after the limit. Empty if there are none."""
        return text(self.orphans, limit, expired=expired)

    async def _look(self) -> None:
        pids = await self._ask()
        self.orphans, self.helpers = find(pids, ranks=self._ranks, run=self._run), bool(pids)


def find(pids: Iterable[int], *, ranks: Mapping[int, int], run: str) -> list[Orphan]:
    """Return the processes among `pids` that may still do work: live, not a helper, and not started by another one of
    them.

    `ranks`: pid of a worker -> its rank.
    """
    found = {pid: read for pid in pids if (read := _read(pid)) is not None}
    return [
        Orphan(pid, command, ranks[session] if session in ranks else _started_by(pid, run))
        for pid, (parent, session, command) in found.items()
        if parent not in found
    ]


def _read(pid: int) -> tuple[int, int, str] | None:
    """Return parent, session and command. None: it has ended, or is a helper."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").decode(errors="replace").split("\0")
    except OSError:
        return None
    name, fields = head.partition("(")[2], rest.split()
    if fields[0] in "ZX" or is_helper(name, words):
        return None
    command = " ".join(" ".join(words).split()) or name
    return int(fields[1]), int(fields[3]), command if len(command) <= _LONGEST else f"{command[: _LONGEST - 1]}…"


def is_helper(name: str, words: list[str]) -> bool:
    """Return whether a process is a helper of multiprocessing or torch, by its name and command line."""
    return name in _HELPER_NAMES or any(known in word for word in words for known in _HELPER_COMMANDS)


def _started_by(pid: int, run: str) -> int | None:
    """Return the rank in the environment of a process."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            environ = {name: value for name, _, value in pairs}
        if environ.get(b"PHALANX_RUN") == run.encode():
            return int(environ[b"RANK"])
    return None


async def _ended(orphans: Iterable[Orphan], timeout: float, stop: asyncio.Event) -> bool:
    """Wait until all of them have ended. False if `stop` was set, or after the timeout."""
    loop = asyncio.get_running_loop()
    handles: set[int] = set()
    over = asyncio.Event()

    def fired(handle: int) -> None:
        loop.remove_reader(handle)
        os.close(handle)
        handles.discard(handle)
        if not handles:
            over.set()

    for orphan in orphans:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(orphan.pid)
            handles.add(handle)
            loop.add_reader(handle, fired, handle)
    if not handles:
        return True
    waiting = [loop.create_task(event.wait()) for event in (over, stop)]
    try:
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return over.is_set()
    finally:
        for task in waiting:
            task.cancel()
        for handle in tuple(handles):
            fired(handle)


def text(orphans: Sequence[Orphan], limit: float | None, *, expired: bool = False) -> str:
    """Return what happens to these processes, now or after the limit. Empty if there are none."""
    if not orphans:
        return ""
    if limit is None:
        return f"leaving {_named(orphans)} (--linger forever)"
    if not limit:
        return f"ending {_named(orphans)} (--linger 0)"
    if expired:
        return f"ending {_named(orphans)} after {limit:g} s (--linger)"
    them = "it" if len(orphans) == 1 else "them"
    return f"waiting up to {limit:g} s (--linger) for {_named(orphans)}; Ctrl-C ends {them} now"


def _named(orphans: Sequence[Orphan]) -> str:
    if len(orphans) == 1:
        return f"a process that is still running ({orphans[0]})"
    more = f"; and {len(orphans) - _MOST} more" if len(orphans) > _MOST else ""
    return f"{len(orphans)} processes that are still running ({'; '.join(map(str, orphans[:_MOST]))}{more})"
