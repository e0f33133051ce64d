"""The engine on MPI, through mpi4py. Tensors are passed without a copy.

MPI chooses the order of reductions and decides whether all ranks get the same bits. 16-bit floats are reduced as 32-bit
ones and rounded once. MPI cannot tell which rank is missing, so a timeout names none. It cannot cancel operations
either, so a process that timed out or failed aborts the whole job when it exits.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives.errors import CallRefused, CollectiveMismatch, CollectiveTimeout, GroupAborted

from .engine import ANY_SOURCE, CallKind, EngineCall, Op, Reduction, spread
from .mpi_library import ErrorTranslation, has_failed, import_mpi, mark_failed
from .mpi_message import MpiMessage, MpiPolling
from .threaded import ENDED, Threaded

PIECE = 1 << 30  # elements per operation: MPI counts in 31 bits
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}
_BOOL_OPS = {Op.SUM: Op.BOR, Op.MAX: Op.BOR, Op.PRODUCT: Op.BAND, Op.MIN: Op.BAND}
_TYPES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
_OPS = {
    Op.SUM: "SUM",
    Op.PRODUCT: "PROD",
    Op.MIN: "MIN",
    Op.MAX: "MAX",
    Op.BAND: "BAND",
    Op.BOR: "BOR",
    Op.BXOR: "BXOR",
}
_COPY_TYPES = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}


def create(ranks: Sequence[int] = ()) -> MpiEngine | None:
    """Create an engine, or return None if this process is not in the group. `ranks`: of the world, in order; empty:
    all. Called by all ranks of the group.
    """
    mpi = import_mpi()
    world = mpi.COMM_WORLD
    launched = os.environ.get("WORLD_SIZE", "1")  # noqa: TID251 - set by torchrun; torch does not read it for mpi
    if world.size == 1 and launched != "1":
        raise CallRefused(
            f"the backend mpi: MPI has started a single process, but WORLD_SIZE is {launched}",
            f"mpirun -n {launched} python …, or another backend: shm, gloo",
        )
    if not ranks:
        return MpiEngine(mpi, world.Dup())
    if world.rank not in ranks:
        return None
    unknown = [rank for rank in ranks if not 0 <= rank < world.size]
    if unknown:
        raise CallRefused(f"a group of ranks {', '.join(map(str, ranks))}: mpirun has started {world.size}")
    group = world.group.Incl(list(ranks))
    try:
        # Ranks of other groups do not take part: the tag separates groups that are created at the same time.
        return MpiEngine(mpi, world.Create_group(group, tag=zlib.crc32(repr(list(ranks)).encode()) % 32768))
    finally:
        group.Free()


class MpiEngine(Threaded):
    """MpiEngine(mpi, comm): collectives use `comm`, messages a duplicate of it.

    Has all_reduce, broadcast and barrier methods that need no EngineCall.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self._mpi = mpi
        self._comm = comm
        self._p2p_comm = comm.Dup()
        self._highest = comm.Get_attr(mpi.TAG_UB)
        self._types = {dtype: getattr(mpi, name) for dtype, name in _TYPES.items()}
        self._ops = {op: getattr(mpi, name) for op, name in _OPS.items()}
        self._copy_types = {size: getattr(mpi, name) for size, name in _COPY_TYPES.items()}
        # Serializes calls if the MPI library is not thread-safe. None of them blocks.
        alone = mpi.Query_thread() < mpi.THREAD_MULTIPLE
        self._held: list[torch.Tensor] = []  # tensors of the call in progress
        self._lock: Any = threading.Lock() if alone else contextlib.nullcontext()

    # -- without an EngineCall

    def all_reduce(self, tensor: torch.Tensor, how: Reduction, timeout: float) -> None:
        """Reduce a tensor over all ranks, in place."""
        if tensor.dtype not in self._types or how.average or how.scale != 1.0 or tensor.numel() > PIECE:
            self.run(EngineCall(CallKind.ALL_REDUCE, (), [tensor], how, timeout=timeout))
            return
        words = (self._mpi.IN_PLACE, [*self._spec(tensor)[:2], self._types[tensor.dtype]], self._ops[how.op])
        self._run_in_order(lambda: self._at_once("all_reduce", timeout, tensor, "Iallreduce", *words))

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float) -> None:
        """Copy the root's tensor to all ranks."""
        if tensor.numel() > PIECE:
            self.run(EngineCall(CallKind.BROADCAST, (), [tensor], root=root, timeout=timeout))
            return
        self._run_in_order(lambda: self._at_once("broadcast", timeout, tensor, "Ibcast", self._spec(tensor), root))

    def barrier(self, timeout: float) -> None:
        """Wait for all ranks."""
        self._run_in_order(lambda: self._at_once("barrier", timeout, None, "Ibarrier"))

    def _at_once(self, what: str, timeout: float, tensor: torch.Tensor | None, name: str, *words: Any) -> None:
        if self._ended:
            raise GroupAborted(ENDED)
        self._held = [] if tensor is None else [tensor]
        with ErrorTranslation(what):
            self._wait(what, timeout, self._begin(name, *words))

    # -- messages

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> MpiMessage:
        """Send a message."""
        self._check(tag)
        with self._lock, ErrorTranslation("send"):
            request = self._p2p_comm.Isend(self._spec(tensor), to, tag)
            return self._message("send", request, tensor, timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> MpiMessage:
        """Receive a message."""
        self._check(tag)
        mpi_source = self._mpi.ANY_SOURCE if source == ANY_SOURCE else source
        with self._lock, ErrorTranslation("recv"):
            request = self._p2p_comm.Irecv(self._spec(tensor), mpi_source, tag)
            return self._message("recv", request, tensor, timeout)

    def _message(self, what: str, request: Any, tensor: torch.Tensor, timeout: float) -> MpiMessage:
        status = self._mpi.Status()
        return MpiMessage(what, request, tensor, timeout, status=status, lock=self._lock, ended=lambda: self._ended)

    def _check(self, tag: int) -> None:
        if self._ended:
            raise GroupAborted(ENDED)
        if not 0 <= tag <= self._highest:
            raise CallRefused(f"tag {tag}: this MPI has tags from 0 to {self._highest}")

    # -- calls

    def close(self) -> None:
        """Free the communicators."""
        super().close()
        comms, self._comm, self._p2p_comm = (self._comm, self._p2p_comm), None, None
        if not has_failed() and not self._mpi.Is_finalized():
            for comm in filter(None, comms):
                with contextlib.suppress(self._mpi.Exception):
                    comm.Free()

    def _do(self, call: EngineCall) -> None:
        if self._ended:
            raise GroupAborted(ENDED)
        what = call.kind.name.lower()
        self._held = []
        with ErrorTranslation(what):
            match call.kind:
                case CallKind.ALL_REDUCE | CallKind.REDUCE:
                    self._reduce(call, what)
                case CallKind.REDUCE_SCATTER:
                    self._reduce_scatter(call, what)
                case CallKind.BROADCAST:
                    for piece in call.outs[0].view(-1).split(PIECE):
                        self._wait(what, call.timeout, self._begin("Ibcast", self._memory(piece), call.root))
                case CallKind.ALL_GATHER:
                    self._all_gather(call, what)
                case CallKind.GATHER:
                    outs = spread(call.outs, self.size) if self.rank == call.root else ()
                    self._exchange(call, what, {call.root: call.ins[0]}, dict(enumerate(outs)))
                case CallKind.SCATTER:
                    ins = spread(call.ins, self.size) if self.rank == call.root else ()
                    self._exchange(call, what, dict(enumerate(ins)), {call.root: call.outs[0]})
                case CallKind.ALL_TO_ALL:
                    ins, outs = spread(call.ins, self.size), spread(call.outs, self.size)
                    self._exchange(call, what, dict(enumerate(ins)), dict(enumerate(outs)))
                case CallKind.BARRIER:
                    self._wait(what, call.timeout, self._begin("Ibarrier"))

    def _reduce(self, call: EngineCall, what: str) -> None:
        how = call.reduction or Reduction()
        takes = call.kind == CallKind.ALL_REDUCE or self.rank == call.root
        for out in call.outs[0].view(-1).split(PIECE):
            part = _prepared(out, how, keep=not takes)
            memory, op = self._numbers(part), self._op(out.dtype, how.op)
            if call.kind == CallKind.ALL_REDUCE:
                request = self._begin("Iallreduce", self._mpi.IN_PLACE, memory, op)
            elif takes:
                request = self._begin("Ireduce", self._mpi.IN_PLACE, memory, op, call.root)
            else:
                request = self._begin("Ireduce", memory, None, op, call.root)
            self._wait(what, call.timeout, request)
            if takes:
                _finish(out, part, how, self.size)

    def _reduce_scatter(self, call: EngineCall, what: str) -> None:
        how, out = call.reduction or Reduction(), call.outs[0].view(-1)
        whole = call.ins[0] if len(call.ins) == 1 else torch.cat([part.view(-1) for part in call.ins])
        part = _prepared(whole.view(-1), how, keep=True)
        result = out if part.dtype == out.dtype else torch.empty_like(out, dtype=part.dtype)
        memory, op = self._numbers(part, out.numel()), self._op(out.dtype, how.op)
        self._wait(what, call.timeout, self._begin("Ireduce_scatter_block", memory, self._numbers(result), op))
        _finish(out, result, how, self.size)

    def _all_gather(self, call: EngineCall, what: str) -> None:
        if len(call.outs) == 1:
            part, whole = call.ins[0], call.outs[0]
            memory = self._memory(whole, part.numel())
            self._wait(what, call.timeout, self._begin("Iallgather", self._memory(part), memory))
            return
        call.outs[self.rank].view(-1).copy_(call.ins[0].view(-1))
        requests = [self._begin("Ibcast", self._memory(out), rank) for rank, out in enumerate(call.outs)]
        self._wait(what, call.timeout, *requests)

    def _exchange(
        self, call: EngineCall, what: str, ins: dict[int, torch.Tensor], outs: dict[int, torch.Tensor]
    ) -> None:
        """Send one tensor to each rank and receive one from each, without copies."""
        if self.rank in outs:
            own, mine = ins[self.rank], outs[self.rank]
            if own.nbytes != mine.nbytes:
                raise CollectiveMismatch(f"{what}: {own.nbytes} bytes for this rank itself, which takes {mine.nbytes}")
            mine.view(-1).copy_(own.view(-1))
        requests = [self._begin("Irecv", self._memory(outs[rank]), rank) for rank in outs if rank != self.rank]
        requests += [self._begin("Isend", self._memory(ins[rank]), rank) for rank in ins if rank != self.rank]
        self._wait(what, call.timeout, *requests)

    # -- MPI

    def _begin(self, name: str, *words: Any) -> Any:
        with self._lock:
            return getattr(self._comm, name)(*words)

    def _wait(self, what: str, timeout: float, *requests: Any) -> None:
        """Wait until all requests have finished."""
        if self._over(requests):
            return
        polling = MpiPolling(sum(tensor.nbytes for tensor in self._held))
        while not self._over(requests):
            if self._ended:
                mark_failed(self._held, requests)
                raise GroupAborted(ENDED)
            if timeout and polling.waited > timeout:
                mark_failed(self._held, requests)
                self._end()
                raise CollectiveTimeout(
                    f"{what} timed out: it waited {timeout:g} s for other ranks; MPI does not report which"
                )
            polling.rest()

    def _over(self, requests: Sequence[Any]) -> bool:
        with self._lock:
            return bool(requests[0].Test() if len(requests) == 1 else self._mpi.Request.Testall(list(requests)))

    def _memory(self, tensor: torch.Tensor, count: int = -1) -> list[Any]:
        """Describe memory to be copied: `count` elements, default: all."""
        self._held.append(tensor)
        return self._spec(tensor, count)

    def _numbers(self, tensor: torch.Tensor, count: int = -1) -> list[Any]:
        self._held.append(tensor)
        return [*self._spec(tensor, count)[:2], self._types[tensor.dtype]]

    def _spec(self, tensor: torch.Tensor, count: int = -1) -> list[Any]:
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.numel() if count < 0 else count, self._copy_types[tensor.element_size()]]

    def _op(self, dtype: torch.dtype, op: Op) -> Any:
        return self._ops[_BOOL_OPS.get(op, op) if dtype == torch.bool else op]


def _prepared(tensor: torch.Tensor, how: Reduction, keep: bool) -> torch.Tensor:
    """Return the tensor in a type that MPI knows, scaled. `keep`: do not modify the tensor itself."""
    part = tensor.to(torch.float32) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    if tensor.dtype == torch.bool:
        part = tensor.view(torch.uint8)
    if how.scale != 1.0:
        factor = how.scale if part.is_floating_point() else int(how.scale)
        part = part * factor if keep and part is tensor else part.mul_(factor)
    return part


def _finish(out: torch.Tensor, part: torch.Tensor, how: Reduction, size: int) -> None:
    if how.average:
        part.div_(size, rounding_mode=None if part.is_floating_point() else "trunc")
    if part.data_ptr() != out.data_ptr():
        out.copy_(part)
