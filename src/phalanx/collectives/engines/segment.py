"""The shared memory of the ranks of one host. It has no name, and ends with the last rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

from phalanx.collectives import _native
from phalanx.collectives.errors import CollectiveTimeout, PeerLost
from phalanx.contract import shared_memory
from phalanx.forkserver.signed_store import SignedStore

SLOT = 1 << 20  # bytes; two per rank
MAX_RANKS = 256  # ranks; must equal the value in native/phx.h
_NAME = "phalanx"  # name of the memory, as the kernel shows it


def problem() -> str:
    """Return why this process cannot use shared memory or pidfds, or "". Some containers forbid them."""
    try:
        os.close(os.memfd_create("phalanx", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the kernel does not allow memfd_create or pidfd_open ({error.strerror})"
    return ""


def create(
    store: SignedStore, rank: int, ranks: Sequence[int], timeout: float, slot: int = SLOT
) -> tuple[int, list[int]]:
    """Return the shared memory, as a descriptor, and the pids of `ranks`, the group's ranks on this host.

    The first rank creates the memory. The others open it through /proc, which the kernel allows to the same user only.
    Close the descriptor once all have joined.
    """
    size, leader = _native.memory(len(ranks), slot), ranks[0]
    store.set(f"shm/pid/{rank}", str(os.getpid()))
    if rank != leader:
        pids = _pids(store, ranks, timeout)
        _wait(store, [f"shm/memory/{leader}"], [leader], timeout)
        return _open(store.get(f"shm/memory/{leader}").decode(), leader, size), pids
    fd = shared_memory.create(_NAME, size)
    try:
        store.set(f"shm/memory/{leader}", f"{os.getpid()}:{fd}:{os.fstat(fd).st_ino}")
        return fd, _pids(store, ranks, timeout)
    except BaseException:  # also KeyboardInterrupt: the descriptor must not leak
        os.close(fd)
        raise


def _pids(store: SignedStore, ranks: Sequence[int], timeout: float) -> list[int]:
    keys = [f"shm/pid/{rank}" for rank in ranks]
    _wait(store, keys, ranks, timeout)
    return [int(store.get(key)) for key in keys]


def _open(where: str, leader: int, size: int) -> int:
    """Open the memory. Reject anything else that the store may contain."""
    pid, number, inode = (int(part) for part in where.split(":"))
    try:
        return shared_memory.open_of(pid, number, _NAME, size=size, inode=inode)
    except FileNotFoundError:
        raise PeerLost(f"joining: peer lost, rank {leader} has ended") from None
    except shared_memory.ForeignMemoryError as error:  # or the leader has closed it, and its number was reused
        raise PeerLost(f"joining: what rank {leader} shares is not the memory of this group: {error}") from None


def _wait(store: SignedStore, keys: list[str], ranks: Sequence[int], timeout: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=timeout or 365 * 24 * 3600))
    except RuntimeError:  # some stores raise no subclass
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        if not missing:
            raise
        names = ", ".join(str(rank) for rank in missing)
        raise CollectiveTimeout(f"joining timed out: waited {timeout:g} s for ranks {names} of this host") from None
