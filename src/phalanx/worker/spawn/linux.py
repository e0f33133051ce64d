"""Linux: no rank outlives the caller of `spawn`: parent-death signal, subreaper, process trees."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MEMORY = "/dev/shm"  # noqa: S108
# torch_shm_manager, as the kernel cuts its name. It ends two seconds after the last process that used it and then
# removes its files, but not if it is killed.
_TIDIES_UP = "torch_shm_manag"
_TIME_TO_TIDY = 4.0


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; if that has ended already, exit."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Return all living descendants of `root`."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found, level = [], [root]
    while level:
        level = [pid for parent_pid in level for pid in children.get(parent_pid, [])]
        found += level
    return found


def end_descendants(patience: float, grace: float) -> set[int]:
    """Reap all descendants; after `patience` seconds send SIGTERM, and after `grace` more SIGKILL. Returns their pids.

    Only for a subreaper: it becomes the parent of orphans, so none is missed.
    """
    start = time.monotonic()
    seen: set[int] = set()
    asked: set[int] = set()
    while _reap():
        waited = time.monotonic() - start
        for pid in descendants(os.getpid()):
            seen.add(pid)
            if waited < _TIME_TO_TIDY and _name(pid) == _TIDIES_UP:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if waited > patience + grace:
                    os.kill(pid, signal.SIGKILL)
                elif waited >= patience and pid not in asked:
                    asked.add(pid)
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # a stopped process would never see the SIGTERM
        time.sleep(0.005)
    return seen


def _name(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().rstrip("\n")
    return ""


def _reap() -> bool:
    """Reap every child that has ended; return whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def remove_shared_memory(pids: set[int]) -> None:
    """Remove the shared memory files of these processes: a killed one could not."""
    names = tuple(f"torch_{pid}_" for pid in pids)
    with contextlib.suppress(OSError):
        for name in os.listdir(_MEMORY):
            if name.startswith(names):
                with contextlib.suppress(OSError):
                    os.unlink(f"{_MEMORY}/{name}")
