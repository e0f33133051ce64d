"""Which engine a new group stands on: where its ranks are decides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from . import neighbours
from .engine import Engine
from .group import Group

_NOTE = (
    "phalanx: shm goes through gloo, slower, for its native part is not built here; "
    "with a C compiler: pip install --force-reinstall --no-deps phalanx\n"
)
_noted = False


def shm(store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> Group:
    """`ranks`: their numbers in the world, where it is not the world."""
    known = neighbours.find(store, rank, size, timeout.total_seconds())
    if len(known.machines) > 1:
        engine = _across(store, rank, size, timeout, ranks, known)
    else:
        engine = _within(store, rank, size, timeout, ranks)
    return Group("shm", engine, store, timeout, ranks)


def mpi(ranks: Sequence[int], timeout: timedelta) -> Group | None:
    """`ranks`: of the world; none: all of them. None: this rank is not among them."""
    from . import mpi as engines

    engine = engines.create(ranks)
    return Group("mpi", engine, dist.HashStore(), timeout, ranks) if engine is not None else None


def _across(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int],
    known: neighbours.Neighbours,
) -> Engine:
    from .nodes import Nodes

    return Nodes(store, rank, size, timeout, ranks, known)


def _within(store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int]) -> Engine:
    try:
        from .shared import Shared
    except ImportError:
        from .plain import Plain

        _note(rank)
        return Plain(store, rank, size, timeout, ranks)
    return Shared(store, rank, size, timeout, ranks)


def _note(rank: int) -> None:
    global _noted
    if rank == 0 and not _noted:
        _noted = True
        sys.stderr.write(_NOTE)
