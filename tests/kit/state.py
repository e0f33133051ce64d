"""The state of this process, read at each call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

from tests.kit import proc

PR_SET_CHILD_SUBREAPER = 36
# Files of the kernel that torch reads when it is imported on ARM, and does not close.
OF_TORCH = "/sys/devices/system/cpu/"
SIGNALS = [(number.name, number) for number in signal.Signals]
# Processes that are not below this one, but start children for it: the warm fork servers in use.
beside: set[int] = set()
_daemons_allowed = False


def adopt_orphans(yes: bool = True) -> None:
    """Make this process the parent of every orphan below it: otherwise a daemon would become a child of init."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@contextlib.contextmanager
def orphans_left_alone() -> Iterator[None]:
    """Start a daemon in this context if it must outlive the test that starts it."""
    global _daemons_allowed
    adopt_orphans(False)
    _daemons_allowed = True
    try:
        yield
    finally:
        _daemons_allowed = False
        adopt_orphans()


def daemons_allowed() -> bool:
    return _daemons_allowed


def has_children() -> bool:
    # One system call, and exact: orphans become children of this process, so no child means no descendant.
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def family() -> set[tuple[int, int]]:
    """Return the identities of the live descendants. Reaps dead children."""
    if not has_children() and not beside:
        return set()
    found = proc.below(os.getpid(), *beside)
    for process in found:
        # One by one: waiting for any child would steal the exit code of a live one from its owner.
        if process.dead and process.parent == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return {process.identity for process in found if not process.exiting}


def descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that the listing itself used
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: path for fd, path in found.items() if not path.startswith(OF_TORCH)}


def handlers() -> dict[str, Any]:
    found: dict[str, Any] = {name: signal.getsignal(number) for name, number in SIGNALS}
    if getattr(found["SIGALRM"], "__module__", "") == "pytest_timeout":
        found["SIGALRM"] = signal.SIG_DFL  # the plugin's own handler, which it removes early when a test fails
    found["the mask"] = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    return found


def umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def held_by_others(path: str) -> bool:
    """Return whether the file belongs to another user, or is open or mapped in a live process that is not below this
    one.
    """
    try:
        file = os.stat(path)
    except FileNotFoundError:
        return True  # removed meanwhile
    ours = {os.getpid(), *proc.descendants(os.getpid(), *beside)}
    others = (process.pid for process in proc.every() if process.pid not in ours)
    return file.st_uid != os.getuid() or any(_holds(pid, file) for pid in others)


def _holds(pid: int, file: os.stat_result) -> bool:
    # By inode and not by name: a semaphore is mapped under a name that it had only while it was created.
    mapped = f" {os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x} {file.st_ino} "
    with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
        with open(f"/proc/{pid}/maps") as maps:
            if mapped in maps.read():
                return True
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), file):
                    return True
    return False


class Helpers:
    """Processes that multiprocessing starts once and keeps to its end: not a leak of the first test."""

    def __init__(self) -> None:
        self.pids: set[int | None] = set()
        self.fds: set[int | None] = set()
        self.tmp: str | None = None
        if tracker := sys.modules.get("multiprocessing.resource_tracker"):
            self.pids.add(tracker._resource_tracker._pid)
            self.fds.add(tracker._resource_tracker._fd)
        if server := sys.modules.get("multiprocessing.forkserver"):
            self.pids.add(server._forkserver._forkserver_pid)
            self.fds.add(server._forkserver._forkserver_alive_fd)
        if process := sys.modules.get("multiprocessing.process"):
            self.tmp = process.current_process()._config.get("tempdir")

    def stop(self) -> None:
        """End them, so that the next test finds none; it gets new ones if it needs them."""
        for server in _helpers():
            with contextlib.suppress(ChildProcessError):
                server._stop()
        if self.tmp:
            sys.modules["multiprocessing.process"].current_process()._config.pop("tempdir")
            shutil.rmtree(self.tmp, ignore_errors=True)


def _helpers() -> Iterator[Any]:
    # The fork server first: it keeps the tracker's pipe open, and the tracker ends when that is closed.
    if module := sys.modules.get("multiprocessing.forkserver"):
        yield module._forkserver
    if module := sys.modules.get("multiprocessing.resource_tracker"):
        yield module._resource_tracker
