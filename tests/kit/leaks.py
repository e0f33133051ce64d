"""Detects what a test leaves behind: in this process, its descendants and its folders, before and after.

    before = Before(tmp)
    ...                      # the test
    found = before.leaks()

A clean comparison costs a fraction of a millisecond: slow checks run only if something differs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest

from tests.kit import proc, state

SHM = "/dev/shm"
GRACE = 2.0 * proc.SLOWEST  # seconds for processes that are just ending; longer is a leak
LONGER = 15.0  # the same for shared memory: it may belong to a concurrent test whose processes were just killed
# The compiler's cache, which torch creates in every process that builds an optimizer, and keeps on purpose.
KEPT_BY_TORCH = "torchinductor_"
# pytest itself writes the phase of the test here.
PYTESTS_OWN = "PYTEST_CURRENT_TEST"


@dataclass(frozen=True)
class Leak:
    kind: str  # process, shm, tmp, fd, thread, env, cwd, umask, signal
    name: str
    text: str

    @property
    def may_pass(self) -> bool:
        return self.kind in {"process", "shm", "tmp", "fd", "thread"}

    def __str__(self) -> str:
        return f"leaked {self.text}"


def allowed(item: pytest.Item, leak: Leak) -> bool:
    """Return whether the test declares this leak."""
    patterns = [pattern for mark in item.iter_markers("leaves") for pattern in mark.args]
    return any(fnmatch(f"{leak.kind}:{leak.name}", pattern) for pattern in patterns)


class Before:
    """The state before the test. `allowed` returns whether a leak is declared."""

    def __init__(self, tmp: str, allowed: Callable[[Leak], bool] = lambda leak: False) -> None:
        self.tmp = tmp
        self.allowed = allowed
        self.foreign: set[str] = set()
        self.family = state.family()
        self.shm = set(os.listdir(SHM))
        self.threads = set(threading.enumerate())
        self.env = dict(os.environ)
        self.cwd = os.getcwd()
        self.umask = state.umask()
        self.handlers = state.handlers()
        self.descriptors = state.descriptors()

    def leaks(self) -> list[Leak]:
        """Return the leaks, after a grace period for processes that are just ending."""
        began = time.monotonic()
        first = True
        while True:
            found = [leak for leak in self._differences(state.Helpers()) if not self.allowed(leak)]
            passing = {leak.kind for leak in found if leak.may_pass}
            if not passing or time.monotonic() - began > (LONGER if "shm" in passing else GRACE):
                return found
            if first:
                gc.collect()  # a file or socket in a reference cycle is closed late, not never
                first = False
            time.sleep(0.02)

    def clean(self, found: list[Leak]) -> None:
        """Undo what can be undone, so that one leak fails only one test.

        Only what certainly belongs to the test: shared memory stays, because another process may be using a file there.
        """
        if (helpers := state.Helpers()).pids - {None, *(pid for pid, _ in self.family)}:
            helpers.stop()
        if any(leak.kind == "process" for leak in found):
            proc.until(self._kill, 10, "leaked processes to die")
        for leak in found:
            with contextlib.suppress(OSError):
                self._undo(leak)

    def _kill(self) -> bool:
        # Repeatedly: the children of a killed process become ours, and may not have been seen yet.
        left = [pid for pid, _ in state.family() - self.family]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def _undo(self, leak: Leak) -> None:
        match leak.kind:
            case "tmp":
                path = f"{self.tmp}/{leak.name}"
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            case "fd":
                os.close(int(leak.name))
            case "env" if leak.name in self.env:
                os.environ[leak.name] = self.env[leak.name]
            case "env":
                del os.environ[leak.name]
            case "cwd":
                os.chdir(self.cwd)
            case "umask":
                os.umask(self.umask)
            case "signal" if leak.name == "the mask":
                signal.pthread_sigmask(signal.SIG_SETMASK, self.handlers[leak.name])
            case "signal":
                signal.signal(signal.Signals[leak.name], self.handlers[leak.name])

    def _differences(self, helpers: state.Helpers) -> Iterator[Leak]:
        yield from self._processes(helpers)
        yield from self._places(helpers)
        yield from self._descriptors(helpers)
        for thread in set(threading.enumerate()) - self.threads:
            yield Leak("thread", thread.name, f"thread {thread.name!r}")
        yield from self._settings()

    def _processes(self, helpers: state.Helpers) -> Iterator[Leak]:
        new = [pid for pid, _ in state.family() - self.family if pid not in helpers.pids]
        served = proc.listening() if new else {}
        for pid in new:
            words = proc.command(pid) or "(no command line)"
            ports = "".join(f", listening on {served[node]}" for node in proc.sockets(pid) if node in served)
            yield Leak("process", words, f"process {pid}: {words}{ports}")

    def _places(self, helpers: state.Helpers) -> Iterator[Leak]:
        for name in sorted({*os.listdir(SHM)} - self.shm - self.foreign):
            if name.startswith("kit-leak-") and name != f"kit-leak-{os.getpid()}":
                continue  # left on purpose by the test of this check, in another pytest that may run concurrently
            # All tests of all workers share this folder, so a file counts only if no other process uses it.
            if state.held_by_others(f"{SHM}/{name}"):
                self.foreign.add(name)
            elif os.path.exists(f"{SHM}/{name}"):  # not a semaphore that its creator has just removed
                yield Leak("shm", name, f"shared memory {SHM}/{name}")
        for name in sorted(os.listdir(self.tmp)):
            if not name.startswith(KEPT_BY_TORCH) and f"{self.tmp}/{name}" != helpers.tmp:
                yield Leak("tmp", name, f"temporary file {name}, in TMPDIR")

    def _descriptors(self, helpers: state.Helpers) -> Iterator[Leak]:
        now = state.descriptors()
        new = {fd: to for fd, to in now.items() if self.descriptors.get(fd) != to and fd not in helpers.fds}
        served = proc.listening() if new else {}
        for fd, target in new.items():
            where = served.get(target.removeprefix("socket:[").removesuffix("]"))
            text = f"listening socket: fd {fd}, {where}" if where else f"fd {fd}: {target}"
            yield Leak("fd", str(fd), text)

    def _settings(self) -> Iterator[Leak]:
        env = dict(os.environ)
        for name in sorted((self.env.keys() | env.keys()) - {PYTESTS_OWN}) if env != self.env else ():
            if (was := self.env.get(name)) != (now := env.get(name)):
                yield Leak("env", name, f"environment variable {name}: was {was!r}, is {now!r}")
        if (cwd := os.getcwd()) != self.cwd:
            yield Leak("cwd", cwd, f"working directory: was {self.cwd}, is {cwd}")
        if (umask := state.umask()) != self.umask:
            yield Leak("umask", f"{umask:03o}", f"umask: was {self.umask:03o}, is {umask:03o}")
        for name, handler in state.handlers().items():
            if handler != (was := self.handlers[name]):
                yield Leak("signal", name, f"signal handler of {name}: was {was}, is {handler}")
