"""The names "shm" and "mpi" for torch.distributed, in every script: torch calls `register` when it is imported.

Nothing is imported here but what torch has already; the rest comes with the first group. This file is also loaded by
its path (_phalanx_backend.py), where it is no part of a package.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

_OURS = ("SHM",)


def register() -> None:
    """Once is enough; more do no harm. What goes wrong must not end `import torch`: torch is as it was."""
    with contextlib.suppress(Exception):  # a torch without torch.distributed, or one that has changed within
        _register()


def _register() -> None:
    from torch.distributed import distributed_c10d as c10d

    backend = c10d.Backend
    if "SHM" in backend._plugins:
        return
    backend.register_backend("shm", _shm, extended_api=True, devices=["cpu"])
    backend._plugins = _Plugins(backend._plugins)
    if not c10d.is_mpi_available():  # a torch that was built with MPI keeps its own
        # Where a group is made. Who asks `dist.is_mpi_available()` hears what it always did: some then choose mpi
        # without being told to, under launchers that are not mpirun.
        c10d.is_mpi_available = _mpi_available
        c10d.ProcessGroupMPI = _Mpi


class _Plugins(dict[str, Any]):
    """Where "cpu:gloo" is asked for, torch looks whether there are any plugins, and then leaves the group without a
    default backend. Ours are found by their names alone, so that nothing changes for others."""

    def keys(self) -> Any:
        return {name: None for name in self if name not in _OURS}.keys()


def _shm(options: Any, _: Any) -> Any:
    _refuse_others(sys._getframe(1).f_locals.get("backend_config"))
    from phalanx.collectives.creation import shm

    return shm(options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group)


def _refuse_others(config: Any) -> None:
    """torch takes a group in Python for the whole one, and would say nothing of what else was asked for."""
    asked = dict(getattr(config, "device_backend_map", None) or {})
    if set(asked.values()) - {"shm"}:
        from phalanx.collectives.errors import CallRefused

        said = ",".join(f"{device}:{name}" for device, name in asked.items())
        raise CallRefused(
            f'"{said}": shm is a group of its own, beside which there is no other backend',
            'init_process_group("shm") for tensors of the CPU, or "cpu:gloo,cuda:nccl"',
        )


def _mpi_available() -> bool:
    """What is missing is said when a group is made, with what to type."""
    return True


class _Mpi:
    """Stands where torch has its own where it was built with MPI."""

    @staticmethod
    def create(ranks: Iterable[int]) -> Any:
        from phalanx.collectives.creation import mpi

        timeout = sys._getframe(1).f_locals.get("timeout")
        return mpi(list(ranks), timeout if isinstance(timeout, timedelta) else timedelta(minutes=30))
