"""Backends that are compared: process groups of torch, shared regions, and plain memory copies."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.comm import traffic
from benchmarks.comm.ranks.operations import ROOT, Buffers, Call, Task
from phalanx.collectives.engines import regions

REGIONS = "regions"

# The older names of these functions warn at every call where the newer ones exist, which takes time.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Backend(Protocol):
    """A backend in one rank."""

    name: str
    device: torch.device

    def place(self, task: Task, buffers: Buffers) -> Buffers:
        """Return the tensors in the memory that this backend needs. Every rank must call it."""

    def call(self, task: Task, buffers: Buffers) -> Call | None:
        """Return the operation, or None if this backend does not have it."""

    def meet(self) -> None:
        """Wait until all ranks have arrived and the device is idle."""

    def settle(self) -> None:
        """Wait until the device is idle."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank."""

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a tensor from a rank."""


class TorchBackend:
    """A process group of torch.distributed."""

    def __init__(self, name: str, device: torch.device, limit: float) -> None:
        self.name = name
        self.device = device
        self.group = dist.new_group(backend=name, timeout=timedelta(seconds=limit))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def meet(self) -> None:
        """Wait until all ranks have arrived and the device is idle."""
        dist.barrier(group=self.group)
        self.settle()

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank."""
        dist.send(tensor, to, group=self.group)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a tensor from a rank."""
        dist.recv(tensor, source, group=self.group)

    def place(self, task: Task, buffers: Buffers) -> Buffers:  # noqa: ARG002
        """Return the tensors in the memory that this backend needs."""
        return buffers

    def call(self, task: Task, b: Buffers) -> Call | None:
        """Return the operation, or None if this backend does not have it."""
        g, root = self.group, b.rank == ROOT
        last = b.ranks - 1
        inside = task.place == "in"
        match task.operation:
            case "all_reduce":
                return lambda: dist.all_reduce(b.whole, group=g)
            case "broadcast":
                return lambda: dist.broadcast(b.whole, ROOT, group=g)
            case "reduce":
                return lambda: dist.reduce(b.whole, ROOT, group=g)
            case "all_gather":
                outs = b.wholes
                return lambda: dist.all_gather(outs, b.part, group=g)
            case "all_gather_into_tensor":
                source = b.wholes[b.rank] if inside else b.part
                return lambda: _all_gather_single(b.whole, source, group=g)
            case "reduce_scatter":
                ins = b.wholes
                return lambda: dist.reduce_scatter(b.part, ins, group=g)
            case "reduce_scatter_tensor":
                target = b.wholes[b.rank] if inside else b.part
                return lambda: _reduce_scatter_single(target, b.whole, group=g)
            case "all_to_all":
                ins, outs = b.wholes, b.others
                return lambda: dist.all_to_all(outs, ins, group=g)
            case "all_to_all_single":
                return lambda: dist.all_to_all_single(b.other, b.whole, group=g)
            case "gather":
                gathered = b.wholes if root else None
                return lambda: dist.gather(b.part, gathered, ROOT, group=g)
            case "scatter":
                scattered = b.wholes if root else None
                return lambda: dist.scatter(b.part, scattered, ROOT, group=g)
            case "barrier":
                return lambda: dist.barrier(group=g)
            case "sendrecv" if last:
                return self._ring(b)
            case "pingpong" if last:
                return _pingpong(self, b)
        return None

    def _ring(self, b: Buffers) -> Call:
        after, before = (b.rank + 1) % b.ranks, (b.rank - 1) % b.ranks
        both = [dist.P2POp(dist.isend, b.whole, after, self.group), dist.P2POp(dist.irecv, b.other, before, self.group)]

        def ring() -> None:
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return ring


class MappedBackend(TorchBackend):
    """shm with tensors in memory that all ranks have mapped, as run.wrap places the buckets of DDP."""

    def __init__(self, limit: float) -> None:
        super().__init__("shm", torch.device("cpu"), limit)
        self.name = REGIONS
        self._limit = limit
        engine = regions.region_engine(self.group)
        if engine is None:
            raise ValueError("the ranks do not share memory")
        self._engine = engine

    def place(self, task: Task, buffers: Buffers) -> Buffers:
        """Return the tensors in the memory that this backend needs."""
        if task.operation != "all_reduce":
            return buffers
        region = regions.Region.create(buffers.bytes)
        regions.share(self._engine, [region], self._limit)
        return replace(buffers, whole=torch.frombuffer(region, dtype=buffers.whole.dtype))

    def call(self, task: Task, b: Buffers) -> Call | None:
        """Return the operation, or None if this backend does not have it."""
        return super().call(task, b) if task.operation == "all_reduce" else None


class CopyBackend:
    """The speed of memory: every rank copies at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.name = device.type
        self.device = device

    def meet(self) -> None:
        """Wait until all ranks have arrived and the device is idle."""
        dist.barrier()
        self.settle()

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank."""
        raise NotImplementedError

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a tensor from a rank."""
        raise NotImplementedError

    def place(self, task: Task, buffers: Buffers) -> Buffers:  # noqa: ARG002
        """Return the tensors in the memory that this backend needs."""
        return buffers

    def call(self, task: Task, b: Buffers) -> Call | None:
        """Return the operation, or None if this backend does not have it."""
        if task.operation != traffic.COPY:
            return None
        if self.device.type == "cuda":
            return lambda: b.other.copy_(b.whole)
        target, source, size, move = b.other.data_ptr(), b.whole.data_ptr(), b.bytes, ctypes.memmove
        return lambda: move(target, source, size)


def _pingpong(backend: TorchBackend, b: Buffers) -> Call:
    last = b.ranks - 1
    if b.rank == 0:

        def ping() -> None:
            backend.send(b.whole, last)
            backend.recv(b.other, last)

        return ping
    if b.rank == last:

        def pong() -> None:
            backend.recv(b.other, 0)
            backend.send(b.whole, 0)

        return pong
    return lambda: None
