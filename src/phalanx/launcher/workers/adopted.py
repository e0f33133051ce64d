"""Processes that have outlived their fork server: workers that can regroup, and the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.forkserver import wire


@dataclass(frozen=True)
class _Adopted:
    pid: int
    handle: int  # a pidfd: readable once the process has ended


class AdoptedProcesses:
    """Signals and reaps the processes of a lost fork server. They are now children of this process, a sub-reaper.

    `exited` gets the message that the fork server would have sent.
    """

    def __init__(self, exited: Callable[[wire.Message], None]) -> None:
        self._exited = exited
        self._processes: dict[str, _Adopted] = {}

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of all that have not exited."""
        return frozenset(process.pid for process in self._processes.values())

    def adopt(self, name: str, pid: int) -> bool:
        """Take over a process, unless it was taken over before. False: it has ended."""
        before = self._processes.get(name)
        if before is not None and before.pid == pid:
            return True  # it outlives another fork server
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        if before is not None:
            self._forget(name)
        self._processes[name] = _Adopted(pid, handle)
        asyncio.get_running_loop().add_reader(handle, self._reap, name)
        return True

    def send_signal(self, name: str, number: int, *, alone: bool) -> bool:
        """Send a signal to a process and its group, or to it alone. False: it was not adopted."""
        process = self._processes.get(name)
        if process is None:
            return False
        # Only this process reaps it, so the pid is valid.
        with contextlib.suppress(ProcessLookupError):
            if alone:
                os.kill(process.pid, number)
            else:
                os.killpg(process.pid, number)
                if number != signal.SIGWINCH:
                    os.killpg(process.pid, signal.SIGCONT)  # a stopped process would not run its handler
        return True

    def _reap(self, name: str) -> None:
        process = self._forget(name)
        status, peak = int(signal.SIGKILL), 0
        with contextlib.suppress(ChildProcessError):
            _, status, usage = os.wait4(process.pid, 0)
            peak = usage.ru_maxrss * 1024
        self._exited({"is": "exited", "name": name, "pid": process.pid, "status": status, "peak": peak})

    def _forget(self, name: str) -> _Adopted:
        process = self._processes.pop(name)
        asyncio.get_running_loop().remove_reader(process.handle)
        os.close(process.handle)
        return process

    def close(self) -> None:
        """Drop all of them, after the attempt."""
        for name in list(self._processes):
            self._forget(name)
