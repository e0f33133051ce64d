"""The engine that needs no compiler: gloo transfers bytes and torch reduces them. Slower, with the same results."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.collectives import mismatch
from phalanx.collectives.errors import CollectiveTimeout, GroupAborted, PeerLost
from phalanx.forkserver.signed_store import SignedStore

from .engine import ANY_SOURCE, CallKind, EngineCall, Op, Reduction, as_bytes, spread
from .threaded import Threaded, ThreadedTask

_FLOAT16 = (torch.float16, torch.bfloat16)
_FOREVER = 366 * 86400.0  # gloo has no infinite timeout
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))


class GlooEngine(Threaded):
    """`store`: used by this group only. `ranks`: the global ranks, for messages."""

    def __init__(self, store: SignedStore, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> None:
        super().__init__(rank, size)
        self._ranks = tuple(ranks) or tuple(range(size))
        self._store = store
        self._gloo: Any = c10d.ProcessGroupGloo(store.torch_prefix("gloo"), rank, size, timeout=timeout)

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> ThreadedTask:
        """Send a message."""
        data = [as_bytes(tensor)]
        return self._message("send", lambda: self._gloo.send(data, to, tag), timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> ThreadedTask:
        """Receive a message."""
        data = [as_bytes(tensor)]
        if source == ANY_SOURCE:
            return self._message("recv", lambda: self._gloo.recv_anysource(data, tag), timeout)
        return self._message("recv", lambda: self._gloo.recv(data, source, tag), timeout)

    def close(self) -> None:
        """Close the gloo group."""
        super().close()
        self._gloo = None

    def _interrupt(self) -> None:
        if self._gloo is not None:
            self._gloo.abort()

    def _message(self, what: str, post: Callable[[], Any], timeout: float) -> GlooMessage:
        if self._ended:
            raise GroupAborted(f"{what}: the group was closed or aborted")
        with self._translate_errors(what, timeout):
            return GlooMessage(unprofiled(post), lambda: self._translate_errors(what, timeout), timeout)

    @contextmanager
    def _translate_errors(self, what: str, timeout: float) -> Iterator[None]:
        """Translate gloo's errors."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            if isinstance(error, dist.DistBackendError) or not ("gloo" in text or "timed out" in text):
                raise
            if self._ended:
                raise GroupAborted(f"{what}: the group was closed or aborted") from None
            if "imed out" in text or "imeout" in text:
                raise CollectiveTimeout(f"{what} timed out after {timeout:g} s: {text}") from None
            raise PeerLost(f"{what}: a rank has ended, or is not reachable: connection closed: {text}") from None

    def _do(self, call: EngineCall) -> None:
        name = call.kind.name.lower()
        with self._translate_errors(name, call.timeout), torch.inference_mode():
            ins, outs = self._parts(call)
            self._compare_calls(call, ins, outs)
            match call.kind:
                case CallKind.ALL_REDUCE:
                    self._all_reduce(call)
                case CallKind.REDUCE:
                    self._reduce(call)
                case CallKind.BROADCAST:
                    self._broadcast(call)
                case CallKind.REDUCE_SCATTER:
                    call.outs[0].view(-1).copy_(self._reduce_part(ins, call).view(-1))
                case CallKind.ALL_GATHER | CallKind.GATHER | CallKind.SCATTER | CallKind.ALL_TO_ALL:
                    self._exchange(ins, outs, call.timeout)
                case CallKind.BARRIER:
                    pass  # the comparison of calls was the barrier

    def _parts(self, call: EngineCall) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the parts that go to each rank, and those that come from each."""
        size, nothing = self.size, torch.empty(0, dtype=torch.uint8)
        ins, outs = call.ins or [nothing] * size, call.outs or [nothing] * size
        match call.kind:
            case CallKind.ALL_GATHER:
                return [ins[0]] * size, spread(outs, size)
            case CallKind.GATHER:
                return [ins[0] if rank == call.root else nothing for rank in range(size)], spread(outs, size)
            case CallKind.SCATTER:
                return spread(ins, size), [outs[0] if rank == call.root else nothing for rank in range(size)]
            case CallKind.REDUCE_SCATTER:
                return spread(ins, size), [outs[0]] * size
            case CallKind.ALL_TO_ALL:
                return spread(ins, size), spread(outs, size)
        return [nothing] * size, [outs[0]] * size

    def _compare_calls(self, call: EngineCall, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Exchange and compare the calls of all ranks, before any data is moved."""
        counts = [tensor.nbytes for tensor in (*ins, *outs)]
        reduction = call.reduction or Reduction()
        of = _DTYPES.index((call.ins or call.outs or ins)[0].dtype)
        how = (reduction.average, _bits(reduction.scale))
        own = torch.tensor([call.kind, of, reduction.op, call.root, *counts, *how])
        calls = [torch.empty_like(own) for _ in range(self.size)]
        options = c10d.AllgatherOptions()
        options.timeout = _timedelta(call.timeout)
        self._gloo.allgather([calls], [own], options).wait()
        rows = [row.tolist() for row in calls]
        if not _calls_match(rows, self.size):
            described = [f"rank {self._ranks[rank]} {_describe(row)}" for rank, row in enumerate(rows)]
            text = f"ranks called different things: {', '.join(described)}"
            raise mismatch.make_error(text, self._store, self.rank, dict(enumerate(self._ranks)))

    def _exchange(self, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], timeout: float) -> None:
        """Send one tensor to each rank and receive one from each."""
        send = torch.cat([as_bytes(tensor) for tensor in ins])
        receive = torch.empty(sum(tensor.nbytes for tensor in outs), dtype=torch.uint8)
        to, of = [tensor.nbytes for tensor in ins], [tensor.nbytes for tensor in outs]
        options = c10d.AllToAllOptions()
        options.timeout = _timedelta(timeout)
        self._gloo.alltoall_base(receive, send, of, to, options).wait()
        for tensor, received in zip(outs, receive.split(of), strict=True):
            as_bytes(tensor).copy_(received)

    def _reduce_part(self, ins: Sequence[torch.Tensor], call: EngineCall) -> torch.Tensor:
        """Return this rank's part, reduced over all ranks."""
        received = [torch.empty_like(ins[self.rank]) for _ in range(self.size)]
        self._exchange(ins, received, call.timeout)
        return reduced(received, call.reduction or Reduction())

    def _all_reduce(self, call: EngineCall) -> None:
        parts = call.outs[0].view(-1).tensor_split(self.size)
        mine = self._reduce_part(parts, call)
        self._exchange([mine] * self.size, parts, call.timeout)

    def _reduce(self, call: EngineCall) -> None:
        none = call.outs[0].view(-1)[:0]
        whole = call.outs[0].view(-1)
        ins = [whole if rank == call.root else none for rank in range(self.size)]
        result = self._reduce_part(ins, call)
        if self.rank == call.root:
            whole.copy_(result)

    def _broadcast(self, call: EngineCall) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank = call.root
        options.timeout = _timedelta(call.timeout)
        if call.outs[0].numel():
            self._gloo.broadcast([as_bytes(call.outs[0])], options).wait()


class GlooMessage(ThreadedTask):
    """A message. gloo cannot test whether one has arrived: `done` starts a thread that waits."""

    def __init__(self, work: Any, errors: Callable[[], Any], timeout: float) -> None:
        super().__init__(self._receive)
        self._work = work
        self._translate_errors = errors
        self._timeout = timeout
        self._once = threading.Lock()
        self._watched = False

    def _receive(self) -> None:
        with self._translate_errors():
            self._work.wait(_timedelta(self._timeout))

    def _finish(self) -> None:
        with self._once:
            if not self._finished.is_set():
                self.run()

    def done(self) -> bool:
        """Return whether the message has arrived."""
        self._watch()
        return super().done()

    def _watch(self) -> None:
        if not self._watched and not self._finished.is_set():
            self._watched = True
            threading.Thread(target=self._finish, name="phalanx-message", daemon=True).start()

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait for the message; return whether it has arrived."""
        if timeout:
            self._watch()
        else:
            self._finish()
        return super().wait(timeout)

    @property
    def source(self) -> int:
        """The rank that the message came from."""
        return int(self._work._source_rank())


def unprofiled(post: Callable[[], Any]) -> Any:
    """Start a gloo operation that profilers do not record, because it may end after the profile.

    A profiler of torch writes the end of an operation to its events. If the profile has ended, their memory is freed.
    """
    torch.autograd._enable_record_function(False)
    try:
        return post()
    finally:
        torch.autograd._enable_record_function(True)


def reduced(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """Apply a reduction to the parts of all ranks, in order."""
    total = _loaded(parts[0], reduction)
    for part in parts[1:]:
        total = _combined(total, _loaded(part, reduction), reduction.op)
    if reduction.average:
        whole = not total.is_floating_point()
        total = torch.div(total, len(parts), rounding_mode="trunc" if whole else None)
    return total.to(parts[0].dtype)


def _loaded(part: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    value = part.float() if part.dtype in _FLOAT16 else part
    if reduction.scale == 1.0:
        return value
    return value * (reduction.scale if value.is_floating_point() else int(reduction.scale))


def _combined(a: torch.Tensor, b: torch.Tensor, op: Op) -> torch.Tensor:
    if a.dtype == torch.bool:
        op = {Op.SUM: Op.BOR, Op.MAX: Op.BOR, Op.PRODUCT: Op.BAND, Op.MIN: Op.BAND}.get(op, op)
    match op:
        case Op.SUM:
            return a + b
        case Op.PRODUCT:
            return a * b
        case Op.MIN:
            return torch.where((b < a) | b.isnan(), b, a)  # NaN wins
        case Op.MAX:
            return torch.where((a < b) | b.isnan(), b, a)
        case Op.BAND:
            return a & b
        case Op.BOR:
            return a | b
        case Op.BXOR:
            return a ^ b


def _calls_match(rows: Sequence[Sequence[int]], size: int) -> bool:
    """Whether all ranks have made the same call. Each row: kind, dtype, op, root, bytes to each rank, bytes from each
    rank, average, scale.
    """
    kind = rows[0][0]
    if any((row[0], row[3]) != (kind, rows[0][3]) for row in rows):
        return False
    if kind in (CallKind.ALL_GATHER, CallKind.GATHER, CallKind.SCATTER, CallKind.ALL_TO_ALL):
        return all(rows[a][4 + b] == rows[b][4 + size + a] for a in range(size) for b in range(size))
    return all(row[1:] == rows[0][1:] for row in rows) or (kind == CallKind.BROADCAST and _same_bytes(rows))


def _same_bytes(rows: Sequence[Sequence[int]]) -> bool:
    return all(row[4:] == rows[0][4:] for row in rows)


def _describe(row: Sequence[int]) -> str:
    kind, dtype = CallKind(row[0]), str(_DTYPES[row[1]]).removeprefix("torch.")
    if kind == CallKind.BARRIER:
        return "barrier"
    reduces = kind in (CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER)
    rooted = kind in (CallKind.REDUCE, CallKind.BROADCAST, CallKind.GATHER, CallKind.SCATTER)
    of = max(*row[4:-2]) // _DTYPES[row[1]].itemsize
    own = f"{kind.name.lower()} of {of} {dtype}"
    how = "AVG" if row[-2] else "PREMUL_SUM" if row[-1] != _bits(1.0) else Op(row[2]).name
    return own + (f" ({how})" if reduces else "") + (f", root {row[3]}" if rooted else "")


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("=d", number), sys.byteorder, signed=True)


def _timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds or _FOREVER)
