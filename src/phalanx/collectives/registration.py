"""Registers the backends "shm" and "mpi" with torch.distributed. torch calls `register` when it is imported.

This module imports only modules that torch has already imported; the rest is imported with the first group. It is also
loaded by path (_phalanx_backend.py), without its package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

_OURS = ("SHM",)


def register() -> None:
    """Register the backends. Safe to call several times. An error must not break `import torch`."""
    try:
        _register()
    except Exception:  # a torch without torch.distributed, or with other internals
        if "logging" in sys.modules:  # not imported here, so that the script finds it unchanged
            sys.modules["logging"].getLogger("phalanx.collectives.registration").debug(
                "cannot register the backends shm and mpi", exc_info=True
            )


def _register() -> None:
    from torch.distributed import distributed_c10d as c10d

    backend = c10d.Backend
    if "SHM" in backend._plugins:
        return
    backend.register_backend("shm", _shm, extended_api=True, devices=["cpu"])
    backend._plugins = _Plugins(backend._plugins)
    # torch 2.15 attaches its flight recorder to the groups of all other backends, which fails for groups in Python.
    # These groups record their calls themselves.
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).update({"shm", "mpi"})
    if not c10d.is_mpi_available():  # a torch built with MPI keeps its own backend
        # Only where groups are created. `dist.is_mpi_available()` is unchanged: some scripts choose mpi if it is
        # available, under launchers other than mpirun.
        c10d.is_mpi_available = _mpi_available
        c10d.ProcessGroupMPI = _Mpi


class _Plugins(dict[str, Any]):
    """torch's table of plugins without ours. For "cpu:gloo", torch checks whether there are any plugins, and then
    creates the group without a default backend. Ours are still found by name.
    """

    def keys(self) -> Any:
        return {name: None for name in self if name not in _OURS}.keys()


def _shm(options: Any, _: Any) -> Any:
    _refuse_others(sys._getframe(1).f_locals.get("backend_config"))
    from phalanx.collectives.creation import shm

    return shm(options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group)


def _refuse_others(config: Any) -> None:
    """Reject other backends beside shm: torch uses a Python process group for all devices and would silently ignore the
    others.
    """
    asked = dict(getattr(config, "device_backend_map", None) or {})
    if set(asked.values()) - {"shm"}:
        from phalanx.collectives.errors import CallRefused

        backends = ",".join(f"{device}:{name}" for device, name in asked.items())
        raise CallRefused(
            f'"{backends}": shm cannot be combined with other backends',
            'init_process_group("shm") for CPU tensors, or "cpu:gloo,cuda:nccl"',
        )


def _mpi_available() -> bool:
    """Return True. Missing requirements are reported, with a fix, when a group is created."""
    return True


class _Mpi:
    """Replaces torch's ProcessGroupMPI, which a torch built without MPI does not have."""

    @staticmethod
    def create(ranks: Iterable[int]) -> Any:
        from phalanx.collectives.creation import mpi

        timeout = sys._getframe(1).f_locals.get("timeout")
        return mpi(list(ranks), timeout if isinstance(timeout, timedelta) else timedelta(minutes=30))
