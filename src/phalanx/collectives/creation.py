"""Which engine a new group stands on: where its ranks are decides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from . import meeting, neighbours
from .engine import Engine
from .group import Group

_NOTE = (
    "phalanx: shm goes through gloo, slower, for its native part is not built here; "
    "with a C compiler: pip install --force-reinstall --no-deps phalanx\n"
)
_noted = False


def shm(store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> Group:
    """`ranks`: what they are called in the world; none: as in the group."""
    meeting.teach(Group)
    names = tuple(ranks) or tuple(range(size))
    known = neighbours.find(store, rank, size, timeout.total_seconds())
    if len(known.machines) > 1:
        from .nodes import Nodes

        inner = _within(store, rank, known.here, names, timeout)
        engine: Engine = Nodes(store, known, inner, timeout.total_seconds(), names)
    else:
        engine = _within(store, rank, range(size), names, timeout)
    return Group("shm", engine, store, timeout, names)


def mpi(ranks: Sequence[int], timeout: timedelta) -> Group | None:
    """`ranks`: of the world; none: all of them. None: this rank is not among them."""
    from . import mpi as engines

    engine = engines.create(ranks)
    return Group("mpi", engine, dist.HashStore(), timeout, ranks) if engine is not None else None


def _within(store: dist.Store, rank: int, here: Sequence[int], names: Sequence[int], timeout: timedelta) -> Engine:
    """`here`: the ranks of the group on this machine."""
    names = [names[one] for one in here]
    try:
        from .shared import join
    except ImportError:
        from .plain import Plain

        _note(rank)
        inside = dist.PrefixStore(f"machine of {here[0]}", store)
        return Plain(inside, here.index(rank), len(here), timeout, names)
    return join(store, rank, here, names, timeout.total_seconds())


def _note(rank: int) -> None:
    global _noted
    if rank == 0 and not _noted:
        _noted = True
        sys.stderr.write(_NOTE)
