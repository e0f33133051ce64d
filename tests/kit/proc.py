"""Processes, read from /proc. A zombie counts as dead: it has only its pid."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

Found = TypeVar("Found")
LISTEN = "0A"
_PF_EXITING = 0x4  # of the kernel
SLOWEST = 4  # timeouts are for an idle machine; a loaded one may be this many times slower


class Process(NamedTuple):
    """One process at one moment. Pid and start time identify it, because pids are reused."""

    pid: int
    start: int
    parent: int
    state: str
    flags: int = 0

    @property
    def dead(self) -> bool:
        return self.state in "ZX"

    @property
    def exiting(self) -> bool:
        """Whether it is dead, or the kernel frees its memory and files: on a busy machine that can take seconds."""
        return self.dead or bool(self.flags & _PF_EXITING)

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start


def read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain spaces and parentheses, so the fields begin after the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[19]), int(fields[1]), fields[0].decode(), int(fields[6]))


def every() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read(int(name))):
            yield process


def below(*pids: int) -> list[Process]:
    """Return all descendants, including zombies, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in every():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [*pids]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.append(child)
            todo.append(child.pid)
    return found


def descendants(*pids: int) -> list[int]:
    """Return the pids of the live descendants."""
    return [process.pid for process in below(*pids) if not process.dead]


def alive(pid: int) -> bool:
    process = read(pid)
    return process is not None and not process.dead


def command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def pid_inside(pid: int) -> int:
    """Return the pid of a process in its own pid namespace; 0: it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[-1]) for line in file if line.startswith("NSpid:"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def sockets(pid: int | str) -> Iterator[str]:
    """Return the inodes of the sockets of a process."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def listening() -> dict[str, str]:
    """Return inode -> address of every listening TCP and Unix socket."""
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        found |= {row[9]: f"port {int(row[1].rsplit(':', 1)[1], 16)}" for row in rows if row[3] == LISTEN}
    with open("/proc/net/unix") as file:
        rows = [line.split() for line in file][1:]
    accepting = 0x10000
    found |= {row[6]: " ".join(row[7:]) or "a nameless socket" for row in rows if int(row[3], 16) & accepting}
    return found


def until(predicate: Callable[[], Found], timeout: float = 10, what: str = "the condition") -> Found:
    """Call `predicate` until its result is true; return that result.

    until(lambda: not alive(pid), 5, f"worker {pid} to end")
    """
    limit = timeout * SLOWEST
    end = time.monotonic() + limit
    while not (found := predicate()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit:g} s for {what}; the last answer was {found!r}")
        time.sleep(0.01)
    return found
