"""Memory that the ranks of one machine share: no name anywhere, and gone with the last of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from phalanx.collectives import _native
from phalanx.collectives.errors import CollectiveTimeout, PeerLost

SLOT = 1 << 20  # bytes; each rank has two
MOST = 256  # ranks: the number of native/phx.h
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def refusal() -> str:
    """Why this process can share no memory, or not see who ends; none: it can. Some containers forbid it."""
    try:
        os.close(os.memfd_create("phalanx", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the kernel lets it not have memfd_create and pidfd_open ({error.strerror})"
    return ""


def make(store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, slot: int = SLOT) -> tuple[int, list[int]]:
    """The memory and the processes of `ranks`, which are those of the group on this machine, by way of its store.

    The first of them makes it. The others open it through /proc, where the kernel lets the same user alone. To be
    closed once all have joined.
    """
    size, leader = _native.memory(len(ranks), slot), ranks[0]
    store.set(f"shm/pid/{rank}", str(os.getpid()))
    if rank != leader:
        pids = _pids(store, ranks, timeout)
        _await(store, [f"shm/memory/{leader}"], [leader], timeout)
        return _open(store.get(f"shm/memory/{leader}").decode(), leader, size), pids
    fd = _create(size)
    try:
        store.set(f"shm/memory/{leader}", f"{os.getpid()}:{fd}:{os.fstat(fd).st_ino}")
        return fd, _pids(store, ranks, timeout)
    except BaseException:
        os.close(fd)
        raise


def _pids(store: dist.Store, ranks: Sequence[int], timeout: float) -> list[int]:
    keys = [f"shm/pid/{rank}" for rank in ranks]
    _await(store, keys, ranks, timeout)
    return [int(store.get(key)) for key in keys]


def _create(size: int) -> int:
    fd = os.memfd_create("phalanx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _open(where: str, leader: int, size: int) -> int:
    """Whatever the store says, nothing but such memory is opened."""
    pid, number, inode = (int(part) for part in where.split(":"))
    path = f"/proc/{pid}/fd/{number}"
    try:
        ours = os.readlink(path).startswith("/memfd:phalanx")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if ours else -1
    except FileNotFoundError:
        raise PeerLost(f"joining: peer lost, rank {leader} has ended") from None
    if fd >= 0:
        found = os.fstat(fd)
        if (found.st_size, found.st_ino) == (size, inode):
            return fd
        os.close(fd)  # that one was closed, and its number has gone on
    raise PeerLost(f"joining: what rank {leader} shares is not the memory of this group")


def _await(store: dist.Store, keys: list[str], ranks: Sequence[int], timeout: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=timeout or 365 * 24 * 3600))
    except RuntimeError:  # of some stores no more than that
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        if not missing:
            raise
        names = ", ".join(str(rank) for rank in missing)
        raise CollectiveTimeout(f"joining timed out: waited {timeout:g} s for ranks {names} of this machine") from None
