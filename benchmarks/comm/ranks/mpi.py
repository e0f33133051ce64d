"""MPI through mpi4py, without torch.distributed: the best that an MPI backend could do."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.comm.ranks.operations import ROOT, Buffers, Call, Task

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}


class MpiBackend:
    """MPI_COMM_WORLD in one rank."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD.Dup()
        self.name = "mpi4py"
        self.device = torch.device("cpu")

    def meet(self) -> None:
        """Wait until all ranks have arrived and the device is idle."""
        self._world.Barrier()

    def settle(self) -> None:
        """Do nothing: MPI calls block."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank."""
        self._world.Send(self._memory(tensor), to)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a tensor from a rank."""
        self._world.Recv(self._memory(tensor), source)

    def place(self, task: Task, buffers: Buffers) -> Buffers:  # noqa: ARG002
        """Return the tensors in the memory that this backend needs."""
        return buffers

    def call(self, task: Task, b: Buffers) -> Call | None:
        """Return the operation, or None if this backend does not have it."""
        if b.whole.dtype not in _TYPES:
            return None
        world, inside, root = self._world, self._mpi.IN_PLACE, b.rank == ROOT
        whole, other, part = map(self._memory, (b.whole, b.other, b.part))
        match task.operation:
            case "all_reduce":
                return lambda: world.Allreduce(inside, whole)
            case "broadcast":
                return lambda: world.Bcast(whole, ROOT)
            case "reduce":
                given, taken = (inside, whole) if root else (whole, None)
                return lambda: world.Reduce(given, taken, root=ROOT)
            case "all_gather" | "all_gather_into_tensor":
                source = inside if task.place == "in" else part
                return lambda: world.Allgather(source, whole)
            case "reduce_scatter" | "reduce_scatter_tensor" if task.place == "out":
                return lambda: world.Reduce_scatter_block(whole, part)
            case "all_to_all" | "all_to_all_single":
                return lambda: world.Alltoall(whole, other)
            case "gather":
                return lambda: world.Gather(part, whole if root else None, ROOT)
            case "scatter":
                return lambda: world.Scatter(whole if root else None, part, ROOT)
            case "barrier":
                barrier: Call = world.Barrier
                return barrier
            case "sendrecv" if b.ranks > 1:
                after, before = (b.rank + 1) % b.ranks, (b.rank - 1) % b.ranks
                return lambda: world.Sendrecv(whole, after, recvbuf=other, source=before)
            case "pingpong" if b.ranks > 1:
                return self._pingpong(b, whole, other)
        return None

    def _pingpong(self, b: Buffers, whole: Any, other: Any) -> Call:
        world, last = self._world, b.ranks - 1
        if b.rank == 0:

            def ping() -> None:
                world.Send(whole, last)
                world.Recv(other, last)

            return ping
        if b.rank == last:

            def pong() -> None:
                world.Recv(other, 0)
                world.Send(whole, 0)

            return pong
        return lambda: None

    def _memory(self, tensor: torch.Tensor) -> Any:
        mpi = self._mpi
        memory = mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return [memory, getattr(mpi, _TYPES[tensor.dtype])]
