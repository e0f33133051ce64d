"""Which engine a new group stands on: where its ranks are decides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from . import monitored, neighbours
from .engines.engine import Engine
from .group import EngineProcessGroup

_NOT_BUILT = "its native part is not built here; with a C compiler: pip install --force-reinstall --no-deps phalanx"
_REFUSED = "shm/refused"
_noted = False


def shm(store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> EngineProcessGroup:
    """`ranks`: what they are called in the world; none: as in the group."""
    monitored.teach(EngineProcessGroup)
    names = tuple(ranks) or tuple(range(size))
    refused = _refusal()
    if refused:
        store.set(_REFUSED, refused)  # before anybody knows of this rank: all of them see it, or none
    known = neighbours.find(store, rank, size, timeout.total_seconds())
    refused = store.get(_REFUSED).decode() if store.check([_REFUSED]) else ""
    if len(known.machines) > 1:
        from .engines.hierarchical import HierarchicalEngine

        inner = _within(store, rank, known.here, names, timeout, refused=refused)
        engine: Engine = HierarchicalEngine(store, known, inner, timeout.total_seconds(), names)
    else:
        engine = _within(store, rank, range(size), names, timeout, refused=refused)
    return EngineProcessGroup("shm", engine, store, timeout, names)


def mpi(ranks: Sequence[int], timeout: timedelta) -> EngineProcessGroup | None:
    """`ranks`: of the world; none: all of them. None: this rank is not among them."""
    from .engines import mpi as engines

    engine = engines.create(ranks)
    return EngineProcessGroup("mpi", engine, dist.HashStore(), timeout, ranks) if engine is not None else None


def _refusal() -> str:
    """Why this process can share no memory; none: it can."""
    try:
        from .engines import segment
    except ImportError:
        return _NOT_BUILT
    return segment.refusal()


def _within(
    store: dist.Store, rank: int, here: Sequence[int], names: Sequence[int], timeout: timedelta, *, refused: str
) -> Engine:
    """`here`: the ranks of the group on this machine. `refused`: why one or another can share no memory."""
    names = [names[one] for one in here]
    if not refused:
        from .engines.segment import MOST
        from .engines.shm import join

        if len(here) <= MOST:
            return join(store, rank, here, names, timeout.total_seconds())
        refused = f"of one machine it takes {MOST} ranks, and here are {len(here)}"
    from .engines.gloo import GlooEngine

    _note(rank, refused)
    return GlooEngine(dist.PrefixStore(f"machine of {here[0]}", store), here.index(rank), len(here), timeout, names)


def _note(rank: int, why: str) -> None:
    global _noted
    if rank == 0 and not _noted:
        _noted = True
        sys.stderr.write(f"phalanx: shm goes through gloo, slower, for {why}\n")
