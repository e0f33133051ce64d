"""Opens the backends of a measurement."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.comm.ranks.backends import REGIONS, Backend, MappedBackend, TorchBackend
from benchmarks.comm.ranks.exchange import first_line
from benchmarks.comm.ranks.mpi import MpiBackend
from benchmarks.comm.results import device_of
from phalanx.collectives import registration


def open_backends(names: tuple[str, ...], device: torch.device, limit: float) -> tuple[list[Backend], dict[str, str]]:
    """Return the backends that work on all ranks, and why the others do not. Every rank must call it."""
    found: list[Backend] = []
    refused: dict[str, str] = {}
    for name in names:
        made: Backend | None = None
        why = ""
        try:
            made = _open(name, device, limit)
        except Exception as error:
            why = first_line(error)
        fine = torch.tensor([made is not None], dtype=torch.int32)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        if made is not None and fine.item():
            found.append(made)
        else:
            refused[name] = why or "it failed on another rank"
    return found, refused


def _open(name: str, device: torch.device, limit: float) -> Backend:
    if name == "mpi4py":
        return MpiBackend()
    registration.register()
    if name == REGIONS:
        return MappedBackend(limit)
    where = device if device_of(name) == "cuda" else torch.device("cpu")
    if where.type != device_of(name):
        raise ValueError(f"{name} needs GPUs, and this rank has none")
    return TorchBackend(name, where, limit)
