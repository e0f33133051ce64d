"""Creates process groups. Chooses the engine by the hosts of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from phalanx.forkserver.signed_store import SignedStore

from . import neighbours
from .engines.engine import Engine
from .process_group import monitored
from .process_group.group import EngineProcessGroup

_NOT_BUILT = "its native extension is not built; with a C compiler: pip install --force-reinstall --no-deps phalanx"
_PROBLEM_KEY = "shm/problem"
_warned = False


def shm(store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> EngineProcessGroup:
    """Create a group of the backend shm. `ranks`: the global ranks; empty: as in the group."""
    monitored.install(EngineProcessGroup)
    names = tuple(ranks) or tuple(range(size))
    signed = SignedStore(store, f"shm group of {' '.join(map(str, names))}")
    problem = _shm_problem()
    if problem:
        signed.set(_PROBLEM_KEY, problem)  # before this rank is announced: all ranks see it, or none
    known = neighbours.find(signed, rank, size, timeout.total_seconds())
    problem = signed.get(_PROBLEM_KEY).decode() if signed.check([_PROBLEM_KEY]) else ""
    if len(known.hosts) > 1:
        from .engines.hierarchical.engine import HierarchicalEngine

        inner = _host_engine(signed, rank, known.here, names, timeout, problem=problem)
        engine: Engine = HierarchicalEngine(signed, known, inner, timeout.total_seconds(), names)
    else:
        engine = _host_engine(signed, rank, range(size), names, timeout, problem=problem)
    return EngineProcessGroup("shm", engine, signed, timeout, names)


def mpi(ranks: Sequence[int], timeout: timedelta) -> EngineProcessGroup | None:
    """Create a group of the backend mpi, or return None if this rank is not in it. `ranks`: of the world; empty:
    all.
    """
    from .engines import mpi as engines

    engine = engines.create(ranks)
    return (
        EngineProcessGroup("mpi", engine, SignedStore(dist.HashStore(), "mpi"), timeout, ranks)
        if engine is not None
        else None
    )


def _shm_problem() -> str:
    """Return why this process cannot use shared memory; empty: it can."""
    try:
        from .engines import segment
    except ImportError:
        return _NOT_BUILT
    return segment.problem()


def _host_engine(
    store: SignedStore, rank: int, here: Sequence[int], names: Sequence[int], timeout: timedelta, *, problem: str
) -> Engine:
    """Create the engine for the ranks of the group on this host, `here`. `problem`: why a rank cannot use shared
    memory.
    """
    names = [names[one] for one in here]
    if not problem:
        from .engines.segment import MAX_RANKS
        from .engines.shm import join

        if len(here) <= MAX_RANKS:
            return join(store, rank, here, names, timeout.total_seconds())
        problem = f"it supports {MAX_RANKS} ranks per host, and this host has {len(here)}"
    from .engines.gloo import GlooEngine

    _warn_fallback(rank, problem)
    return GlooEngine(store.at(f"host of {here[0]}"), here.index(rank), len(here), timeout, names)


def _warn_fallback(rank: int, why: str) -> None:
    global _warned
    if rank == 0 and not _warned:
        _warned = True
        sys.stderr.write(f"phalanx: the backend shm falls back to gloo, which is slower: {why}\n")
