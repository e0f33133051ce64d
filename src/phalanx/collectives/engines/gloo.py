"""An engine without a compiler: gloo carries bytes, torch reduces them. Slower, and the same results."""

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

from .engine import ANYONE, CallKind, EngineCall, Op, Reduction, as_bytes, spread
from .threaded import Threaded, ThreadedTask

_HALVES = (torch.float16, torch.bfloat16)
_FOREVER = 366 * 86400.0  # gloo knows no "for ever"
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))


class GlooEngine(Threaded):
    """`store`: of this group alone. `ranks`: their numbers in the world, for what is said of them."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> None:
        super().__init__(rank, size)
        self._ranks = tuple(ranks) or tuple(range(size))
        self._store = store
        self._gloo: Any = c10d.ProcessGroupGloo(dist.PrefixStore("plain/", store), rank, size, timeout=timeout)

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> ThreadedTask:
        data = [as_bytes(tensor)]
        return self._message("send", lambda: self._gloo.send(data, to, tag), timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> ThreadedTask:
        data = [as_bytes(tensor)]
        if source == ANYONE:
            return self._message("recv", lambda: self._gloo.recv_anysource(data, tag), timeout)
        return self._message("recv", lambda: self._gloo.recv(data, source, tag), timeout)

    def close(self) -> None:
        super().close()
        self._gloo = None

    def _interrupt(self) -> None:
        if self._gloo is not None:
            self._gloo.abort()

    def _message(self, what: str, post: Callable[[], Any], timeout: float) -> GlooMessage:
        if self._ended:
            raise GroupAborted(f"{what}: the group was ended")
        with self._trouble(what, timeout):
            return GlooMessage(post(), lambda: self._trouble(what, timeout), timeout)

    @contextmanager
    def _trouble(self, what: str, timeout: float) -> Iterator[None]:
        """What gloo says is one of our errors."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            if isinstance(error, dist.DistBackendError) or not ("gloo" in text or "timed out" in text):
                raise
            if self._ended:
                raise GroupAborted(f"{what}: the group was ended") from None
            if "imed out" in text or "imeout" in text:
                raise CollectiveTimeout(f"{what} waited {timeout:g} s for other ranks: {text}") from None
            raise PeerLost(f"{what}: a rank has ended, or is not reachable: connection closed: {text}") from None

    def _do(self, call: EngineCall) -> None:
        name = call.kind.name.lower()
        with self._trouble(name, call.timeout), torch.inference_mode():
            ins, outs = self._shares(call)
            self._agree(call, ins, outs)
            match call.kind:
                case CallKind.ALL_REDUCE:
                    self._all_reduce(call)
                case CallKind.REDUCE:
                    self._reduce(call)
                case CallKind.BROADCAST:
                    self._broadcast(call)
                case CallKind.REDUCE_SCATTER:
                    call.outs[0].view(-1).copy_(self._reduced(ins, call).view(-1))
                case CallKind.ALL_GATHER | CallKind.GATHER | CallKind.SCATTER | CallKind.ALL_TO_ALL:
                    self._swap(ins, outs, call.timeout)
                case CallKind.BARRIER:
                    """They have all said that they are here."""

    def _shares(self, call: EngineCall) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """What goes to each rank, and what comes from each."""
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

    def _agree(self, call: EngineCall, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Everybody learns what everybody has called, before anything is moved."""
        counts = [tensor.nbytes for tensor in (*ins, *outs)]
        reduction = call.reduction or Reduction()
        of = _DTYPES.index((call.ins or call.outs or ins)[0].dtype)
        how = (reduction.average, _bits(reduction.before))
        said = torch.tensor([call.kind, of, reduction.op, call.root, *counts, *how])
        heard = [torch.empty_like(said) for _ in range(self.size)]
        options = c10d.AllgatherOptions()
        options.timeout = _timedelta(call.timeout)
        self._gloo.allgather([heard], [said], options).wait()
        rows = [row.tolist() for row in heard]
        if not _agreed(rows, self.size):
            told = [f"rank {self._ranks[rank]} {_called(row)}" for rank, row in enumerate(rows)]
            text = f"ranks called different things: {', '.join(told)}"
            raise mismatch.mismatch(text, self._store, self.rank, dict(enumerate(self._ranks)))

    def _swap(self, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], timeout: float) -> None:
        """To each rank its own, from each rank what it has for us."""
        there = torch.cat([as_bytes(tensor) for tensor in ins])
        here = torch.empty(sum(tensor.nbytes for tensor in outs), dtype=torch.uint8)
        to, of = [tensor.nbytes for tensor in ins], [tensor.nbytes for tensor in outs]
        options = c10d.AllToAllOptions()
        options.timeout = _timedelta(timeout)
        self._gloo.alltoall_base(here, there, of, to, options).wait()
        for tensor, came in zip(outs, here.split(of), strict=True):
            as_bytes(tensor).copy_(came)

    def _reduced(self, ins: Sequence[torch.Tensor], call: EngineCall) -> torch.Tensor:
        """Our part of what all have."""
        came = [torch.empty_like(ins[self.rank]) for _ in range(self.size)]
        self._swap(ins, came, call.timeout)
        return reduced(came, call.reduction or Reduction())

    def _all_reduce(self, call: EngineCall) -> None:
        parts = call.outs[0].view(-1).tensor_split(self.size)
        mine = self._reduced(parts, call)
        self._swap([mine] * self.size, parts, call.timeout)

    def _reduce(self, call: EngineCall) -> None:
        none = call.outs[0].view(-1)[:0]
        whole = call.outs[0].view(-1)
        ins = [whole if rank == call.root else none for rank in range(self.size)]
        result = self._reduced(ins, call)
        if self.rank == call.root:
            whole.copy_(result)

    def _broadcast(self, call: EngineCall) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank = call.root
        options.timeout = _timedelta(call.timeout)
        if call.outs[0].numel():
            self._gloo.broadcast([as_bytes(call.outs[0])], options).wait()


class GlooMessage(ThreadedTask):
    """Gloo does not tell whether a message has come without waiting for it: who asks has a thread wait."""

    def __init__(self, work: Any, trouble: Callable[[], Any], timeout: float) -> None:
        super().__init__(self._receive)
        self._work = work
        self._trouble = trouble
        self._timeout = timeout
        self._once = threading.Lock()
        self._watched = False

    def _receive(self) -> None:
        with self._trouble():
            self._work.wait(_timedelta(self._timeout))

    def _finish(self) -> None:
        with self._once:
            if not self._over.is_set():
                self.run()

    def done(self) -> bool:
        self._watch()
        return super().done()

    def _watch(self) -> None:
        if not self._watched and not self._over.is_set():
            self._watched = True
            threading.Thread(target=self._finish, name="phalanx-message", daemon=True).start()

    def wait(self, timeout: float = 0.0) -> bool:
        if timeout:
            self._watch()
        else:
            self._finish()
        return super().wait(timeout)

    @property
    def source(self) -> int:
        return int(self._work._source_rank())


def reduced(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """What engine.Reduction says of so many ranks, in their order."""
    total = _loaded(parts[0], reduction)
    for part in parts[1:]:
        total = _combined(total, _loaded(part, reduction), reduction.op)
    if reduction.average:
        whole = not total.is_floating_point()
        total = torch.div(total, len(parts), rounding_mode="trunc" if whole else None)
    return total.to(parts[0].dtype)


def _loaded(part: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    value = part.float() if part.dtype in _HALVES else part
    if reduction.before == 1.0:
        return value
    return value * (reduction.before if value.is_floating_point() else int(reduction.before))


def _combined(a: torch.Tensor, b: torch.Tensor, op: Op) -> torch.Tensor:
    if a.dtype == torch.bool:
        op = {Op.SUM: Op.BOR, Op.MAX: Op.BOR, Op.PRODUCT: Op.BAND, Op.MIN: Op.BAND}.get(op, op)
    match op:
        case Op.SUM:
            return a + b
        case Op.PRODUCT:
            return a * b
        case Op.MIN:
            return torch.where((b < a) | b.isnan(), b, a)  # what is not a number wins
        case Op.MAX:
            return torch.where((a < b) | b.isnan(), b, a)
        case Op.BAND:
            return a & b
        case Op.BOR:
            return a | b
        case Op.BXOR:
            return a ^ b


def _agreed(rows: Sequence[Sequence[int]], size: int) -> bool:
    """Each row: kind, type, operation, root, bytes that go to each rank, bytes that come from each, average, factor."""
    kind = rows[0][0]
    if any((row[0], row[3]) != (kind, rows[0][3]) for row in rows):
        return False
    if kind in (CallKind.ALL_GATHER, CallKind.GATHER, CallKind.SCATTER, CallKind.ALL_TO_ALL):
        return all(rows[a][4 + b] == rows[b][4 + size + a] for a in range(size) for b in range(size))
    return all(row[1:] == rows[0][1:] for row in rows) or (kind == CallKind.BROADCAST and _same_bytes(rows))


def _same_bytes(rows: Sequence[Sequence[int]]) -> bool:
    return all(row[4:] == rows[0][4:] for row in rows)


def _called(row: Sequence[int]) -> str:
    kind, dtype = CallKind(row[0]), str(_DTYPES[row[1]]).removeprefix("torch.")
    if kind == CallKind.BARRIER:
        return "barrier"
    reduces = kind in (CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER)
    rooted = kind in (CallKind.REDUCE, CallKind.BROADCAST, CallKind.GATHER, CallKind.SCATTER)
    of = max(*row[4:-2]) // _DTYPES[row[1]].itemsize
    said = f"{kind.name.lower()} of {of} {dtype}"
    how = "AVG" if row[-2] else "PREMUL_SUM" if row[-1] != _bits(1.0) else Op(row[2]).name
    return said + (f" ({how})" if reduces else "") + (f", root {row[3]}" if rooted else "")


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("=d", number), sys.byteorder, signed=True)


def _timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds or _FOREVER)
