"""The few system calls that Python 3.11 lacks. Standard library only: the holder loads this by path."""

from __future__ import annotations

import ctypes
import os
import signal

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {source} on {target}")


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent ends, however it ends; at once if it already has."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
