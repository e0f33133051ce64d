"""A barrier that says who has not come: what `dist.monitored_barrier` asks of a group, in gloo's words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .errors import CollectiveTimeout

_taught = False


def hold(store: dist.Store, rank: int, names: Sequence[int], timeout: float, all_of_them: bool) -> None:
    """`names`: of all ranks. The first waits for the others, and tells them how it went."""
    if rank:
        store.set(str(rank), "here")
        if not _came(store, "end", timeout) or store.get("end") != b"met":
            raise CollectiveTimeout(
                f"Rank {names[rank]} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank {names[0]}: see what that one says, or its timeout was over"
            )
        return
    until = time.monotonic() + timeout
    missing: list[int] = []
    for other in range(1, len(names)):
        if not _came(store, str(other), until - time.monotonic()):
            missing.append(names[other])
            if not all_of_them:
                break
    store.set("end", "missed" if missing else "met")
    if missing and timeout <= 0:
        raise CollectiveTimeout(f"Rank {names[0]} timed out in monitoredBarrier after {timeout * 1000:.0f} ms")
    if missing:
        who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise CollectiveTimeout(f"{who} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms (timed out)")


def _came(store: dist.Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:  # each store has its own
        return False
    return True


def teach(kind: type) -> None:
    """torch lets gloo alone have this barrier: groups of this kind too."""
    global _taught
    if _taught:
        return
    _taught = True
    theirs = c10d.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = c10d._get_default_group() if group is None else group
        if not isinstance(chosen, kind):
            theirs(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        chosen.monitored_barrier(limit, wait_all_ranks)  # type: ignore[attr-defined]

    monitored_barrier.__doc__ = theirs.__doc__
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
