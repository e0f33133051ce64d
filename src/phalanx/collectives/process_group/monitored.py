"""`dist.monitored_barrier`: a barrier that names the ranks that did not arrive, with gloo's messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.collectives.errors import CollectiveTimeout
from phalanx.forkserver.signed_store import SignedStore

_installed = False


class MonitoredBarrier:
    """The monitored barriers of one group. `names`: the global ranks."""

    def __init__(self, store: SignedStore, rank: int, names: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._count = 0

    def wait(self, timeout: float, wait_all_ranks: bool) -> None:
        """Wait for all ranks."""
        self._count += 1
        store = self._store.at(f"monitored/{self._count}")
        _wait(store, self._rank, self._names, timeout, wait_all_ranks)


def _wait(store: SignedStore, rank: int, names: Sequence[int], timeout: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks. Rank 0 waits for the others and sends them the outcome. `names`: the global ranks."""
    if rank:
        store.set(str(rank), "here")
        if not _arrived(store, "end", timeout) or store.get("end") != b"done":
            raise CollectiveTimeout(
                f"Rank {names[rank]} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank {names[0]}: see the error of that rank, or it timed out"
            )
        return
    deadline = time.monotonic() + timeout
    missing: list[int] = []
    for other in range(1, len(names)):
        if not _arrived(store, str(other), deadline - time.monotonic()):
            missing.append(names[other])
            if not wait_all_ranks:
                break
    store.set("end", "failed" if missing else "done")
    if missing and timeout <= 0:
        raise CollectiveTimeout(f"Rank {names[0]} timed out in monitoredBarrier after {timeout * 1000:.0f} ms")
    if missing:
        who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise CollectiveTimeout(f"{who} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms (timed out)")


def _arrived(store: SignedStore, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:  # stores raise different subclasses
        return False
    return True


def install(kind: type) -> None:
    """Make `dist.monitored_barrier` accept groups of this class: torch allows it for gloo only."""
    global _installed
    if _installed:
        return
    _installed = True
    original = c10d.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = c10d._get_default_group() if group is None else group
        if not isinstance(chosen, kind):
            original(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        chosen.monitored_barrier(limit, wait_all_ranks)  # type: ignore[attr-defined]

    monitored_barrier.__doc__ = original.__doc__
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
