"""The engine in shared memory: tensors are moved and reduced in C, here they become addresses, and results errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from phalanx.collectives import _native, mismatch
from phalanx.collectives.engines import segment
from phalanx.collectives.engines.engine import ANYONE, CallKind, EngineCall, Op, Reduction
from phalanx.collectives.errors import CallRefused, CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost

# Numbers are those of native/reduce.h. What is merely moved may be of other types: one number for all of them.
DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.bfloat16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bool: 9,
    torch.uint16: 10,
    torch.uint32: 11,
    torch.uint64: 12,
}
OTHER = 99
_NAMES = {number: dtype for dtype, number in DTYPES.items()}

# native/phx.h
_DEAD, _TIMEOUT, _ABORTED, _MISMATCH = 1, 2, 3, 4

_FROM_ROOT = {CallKind.BROADCAST, CallKind.SCATTER}
_TO_ROOT = {CallKind.REDUCE, CallKind.GATHER}
_REDUCTIONS = {CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER}


def join(store: dist.Store, rank: int, here: Sequence[int], ranks: Sequence[int], timeout: float) -> ShmEngine:
    """`rank` of a group, `here` those of it on this machine, `ranks` what the latter are called in the world."""
    fd, pids = segment.make(store, rank, here, timeout)
    try:
        engine = ShmEngine(fd, here.index(rank), pids, ranks, timeout)
    finally:
        os.close(fd)
    names = dict(zip(here, ranks, strict=True))
    engine.differing = lambda text: mismatch.mismatch(text, store, rank, names)
    return engine


class ShmEngine:
    """An Engine; all_reduce, broadcast and barrier besides, which make no Call."""

    def __init__(
        self,
        fd: int,
        rank: int,
        pids: Sequence[int],
        ranks: Sequence[int],
        timeout: float,
        *,
        slot: int = segment.SLOT,
        direct: bool = True,  # read the memory of others, where the kernel lets all ranks
    ) -> None:
        self.differing: Callable[[str], CollectiveMismatch] = (
            CollectiveMismatch  # what is said where ranks called different things
        )
        self.rank = rank
        self.size = len(pids)
        self._ranks = ranks
        self._alive: deque[tuple[int, EngineCall]] = deque()  # what the group's thread still reads and writes
        self._first: dist.DistBackendError | None = None
        self._lent = 0
        self._dropped: list[tuple[int, torch.Tensor]] = []  # messages under way that nobody will wait for
        try:
            self._group = _native.join(fd, rank, self.size, slot, pids, direct, _ms(timeout))
        except OSError as error:
            raise _not_joined(error, timeout) from None
        # Also at the end of the interpreter: the thread must not outlive the tensors.
        self._leave = weakref.finalize(self, _native.leave, self._group)

    # -- without a Call

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, timeout: float) -> None:
        result = _native.all_reduce(
            self._group,
            tensor.data_ptr(),
            tensor.numel(),
            DTYPES.get(tensor.dtype, OTHER),
            reduction.op,
            reduction.before,
            reduction.average,
            _ms(timeout),
        )
        if result:
            raise self._trouble(result, "all_reduce", timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float) -> None:
        dtype = DTYPES.get(tensor.dtype, OTHER)
        result = _native.broadcast(self._group, tensor.data_ptr(), tensor.nbytes, dtype, root, _ms(timeout))
        if result:
            raise self._trouble(result, "broadcast", timeout)

    def barrier(self, timeout: float) -> None:
        result = _native.barrier(self._group, _ms(timeout))
        if result:
            raise self._trouble(result, "barrier", timeout)

    # -- Engine

    def run(self, call: EngineCall) -> None:
        result = _native.run(self._group, *self._words(call))
        if result:
            raise self._trouble(result, call.kind.name.lower(), call.timeout)

    def start(self, call: EngineCall) -> StartedCall:
        while self._alive and _native.done(self._group, self._alive[0][0]):
            self._alive.popleft()
        ticket = _native.start(self._group, *self._words(call))
        self._alive.append((ticket, call))
        return StartedCall(self, ticket, call)

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> ShmMessage:
        if self._dropped:
            self._forget()
        ticket = _native.send(self._group, tensor.data_ptr(), tensor.nbytes, to, tag, _ms(timeout))
        return ShmMessage(self, "send", ticket, tensor, peer=to, tag=tag, timeout=timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> ShmMessage:
        if self._dropped:
            self._forget()
        ticket = _native.recv(self._group, tensor.data_ptr(), tensor.nbytes, source, tag, _ms(timeout))
        return ShmMessage(self, "recv", ticket, tensor, peer=source, tag=tag, timeout=timeout)

    def abort(self) -> None:
        if self._leave.alive:
            _native.abort(self._group)

    def close(self) -> None:
        if self._leave():  # else the group's thread may still be writing: they go with this object
            self._alive.clear()

    # -- memory that all have mapped: regions.py

    def lend(self, size: int, places: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """`places`: where that of each rank is here, and there. By all ranks alike; returns what takes it back."""
        self._lent += 1
        _native.lend(self._group, self._lent, size, tuple(word for place in places for word in place))
        return functools.partial(_withdraw, self._group, self._lent)

    def _forget(self) -> None:
        """Tensors whose messages have gone meanwhile."""
        dropped, self._dropped = self._dropped, []
        for ticket, tensor in dropped:
            if _native.parcel_done(self._group, ticket):
                _native.parcel_wait(self._group, ticket, 0)
            else:
                self._dropped.append((ticket, tensor))

    def _words(self, call: EngineCall) -> tuple[object, ...]:
        first = call.outs[0] if call.outs else call.ins[0] if call.ins else None
        dtype = 0 if first is None else DTYPES.get(first.dtype, OTHER)
        how = call.reduction or _SUM
        ins = _parts(call.ins, self.size if call.kind in _INS_EACH else 1)
        outs = _parts(call.outs, self.size if call.kind in _OUTS_EACH else 1)
        return call.kind, dtype, how.op, call.root, how.before, how.average, _ms(call.timeout), ins, outs

    # -- what went wrong

    def _trouble(self, result: int, what: str, timeout: float) -> dist.DistBackendError:
        if self._first:
            return type(self._first)(f"{what}: this group has ended before: {self._first}")
        self._first = self._explained(result, what, timeout)
        return self._first

    def _explained(self, result: int, what: str, timeout: float) -> dist.DistBackendError:
        if result == _MISMATCH:
            return self.differing(self._differences())
        if result == _ABORTED:
            return GroupAborted(f"{what}: the process group was aborted")
        culprits = _native.culprits(self._group)
        who = self._named(culprits)
        if result == _DEAD:
            return PeerLost(f"{what}: peer lost, {who} {'has' if len(culprits) == 1 else 'have'} ended")
        if result == _TIMEOUT and self.rank in culprits:
            return CollectiveTimeout(f"{what}: this rank came too late, the others' wait for {who} timed out")
        if result == _TIMEOUT:
            return CollectiveTimeout(f"{what}: {who} did not come within the timeout of {timeout:g} s")
        return GroupAborted(f"{what}: the kernel does not let a rank read its peer's memory any more")

    def _named(self, ranks: Sequence[int]) -> str:
        return named([self._ranks[rank] for rank in ranks], ranks)

    def _differences(self) -> str:
        said: dict[str, list[int]] = {}
        for rank in range(self.size):
            said.setdefault(self._told(*_native.said(self._group, rank)), []).append(rank)
        if len(said) == 1:
            but = "what one gives is not of the size that another takes"
            if _native.said(self._group, self.rank)[0] in (
                CallKind.ALL_REDUCE,
                CallKind.REDUCE,
            ):  # whose sizes were said
                but = "some for the average (AVG), or with another factor (PREMUL_SUM)"
            return f"ranks called {next(iter(said))}, but {but}"
        return "ranks called different things: " + ", ".join(f"{self._named(who)} {what}" for what, who in said.items())

    def _told(  # noqa: PLR0917
        self, kind: int, dtype: int, op: int, root: int, average: int, bytes_: int, before: float
    ) -> str:
        text = CallKind(kind).name.lower()
        if kind == CallKind.BARRIER:
            return text
        if dtype in _NAMES:
            name = str(_NAMES[dtype]).removeprefix("torch.")
            text += f" of {bytes_ // _NAMES[dtype].itemsize} {name}"
        else:
            text += f" of {bytes_} bytes"
        if kind in _REDUCTIONS:
            text += f" ({'AVG' if average else Op(op).name}{f' of {before:g} times each' if before != 1 else ''})"
        if kind in _FROM_ROOT:
            text += f" from {self._named([root])}"
        if kind in _TO_ROOT:
            text += f" to {self._named([root])}"
        return text


class StartedCall:
    """A collective under way in the group's thread."""

    source = -1

    def __init__(self, engine: ShmEngine, ticket: int, call: EngineCall) -> None:
        self._engine = engine
        self._ticket = ticket
        self._call = call

    def done(self) -> bool:
        return bool(_native.done(self._engine._group, self._ticket))

    def wait(self, timeout: float = 0.0) -> bool:
        result = _native.wait(self._engine._group, self._ticket, _ms(timeout))
        if result > 0:
            raise self._engine._trouble(result, self._call.kind.name.lower(), self._call.timeout)
        return result == 0


def _withdraw(group: _native.Group, number: int) -> None:
    with contextlib.suppress(ValueError):  # it was left, or is another process's
        _native.withdraw(group, number)


class ShmMessage:
    """A message under way."""

    def __init__(
        self, engine: ShmEngine, what: str, ticket: int, tensor: torch.Tensor, *, peer: int, tag: int, timeout: float
    ) -> None:
        self.source = peer
        self._engine = engine
        self._what = what
        self._ticket = ticket
        self._tensor = tensor  # read or written by others until it is over
        self._tag = tag
        self._timeout = timeout
        self._over = False
        self._lock = threading.RLock()  # its result is given once
        self._trouble: dist.DistBackendError | None = None

    def __del__(self) -> None:
        if not self._over and self._ticket > _SENT:
            self._engine._dropped.append((self._ticket, self._tensor))

    def done(self) -> bool:
        return self._over or bool(_native.parcel_done(self._engine._group, self._ticket))

    def wait(self, timeout: float = 0.0) -> bool:
        if not self._over and not self._trouble:
            if not self._lock.acquire(timeout=timeout or -1):
                return False
            try:
                if not self._over and not self._trouble and not self._settled(timeout):
                    return False
            finally:
                self._lock.release()
        if self._trouble:
            raise self._trouble
        return True

    def _settled(self, timeout: float) -> bool:
        try:
            result, peer, size = _native.parcel_wait(self._engine._group, self._ticket, _ms(timeout))
        except BaseException:  # of a signal's handler: it was taken back
            self._trouble = GroupAborted(f"{self._what} was interrupted before")
            raise
        if result > 0:
            self._trouble = self._explained(result, peer, size)
        elif result == 0 and self._what == "recv":
            self.source = peer
        self._over = result >= 0
        return self._over

    def _explained(self, result: int, peer: int, size: int) -> dist.DistBackendError:
        engine, what = self._engine, self._what
        if result == _MISMATCH:
            mine, who = self._tensor.nbytes, engine._named([peer])
            if what == "recv":
                return CollectiveMismatch(f"recv of {mine} bytes from {who}: it sent {size} bytes (tag {self._tag})")
            return CollectiveMismatch(f"send of {mine} bytes to {who}: it receives {size} bytes (tag {self._tag})")
        if result == _DEAD and peer >= 0:
            return PeerLost(f"{what}: peer lost, {engine._named([peer])} has ended")
        if result == _DEAD and self.source == ANYONE and not _native.culprits(engine._group):
            return PeerLost(f"{what}: peer lost, all other ranks have ended")
        if result == _TIMEOUT and (peer >= 0 or self.source == ANYONE):
            who = engine._named([peer]) if peer >= 0 else "any rank"
            return CollectiveTimeout(f"{what} timed out: it waited {self._timeout:g} s for {who} (tag {self._tag})")
        return engine._trouble(result, what, self._timeout)


_SENT = 1  # the ticket of what was over at once: native/parcels.c
_SUM = Reduction()
_INS_EACH = {CallKind.SCATTER, CallKind.REDUCE_SCATTER, CallKind.ALL_TO_ALL}
_OUTS_EACH = {CallKind.ALL_GATHER, CallKind.GATHER, CallKind.ALL_TO_ALL}


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000)) if seconds > 0 else 0


def _parts(tensors: Sequence[torch.Tensor], wanted: int) -> tuple[int, ...]:
    """Address and bytes of each; one alone may be a whole of as many equal parts."""
    if len(tensors) == 1 and wanted > 1:
        at, each = tensors[0].data_ptr(), tensors[0].nbytes // wanted
        return tuple(word for part in range(wanted) for word in (at + part * each, each))
    return tuple(word for tensor in tensors for word in (tensor.data_ptr(), tensor.nbytes))


def named(ranks: Sequence[int], of_group: Sequence[int]) -> str:
    """`rank 3`, `ranks 1 and 3`, `rank 3 (of this group: 1)`."""
    words = [
        str(rank) if rank == own else f"{rank} (of this group: {own})"
        for rank, own in zip(ranks, of_group, strict=True)
    ]
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "nobody"
    return f"{'rank' if len(words) == 1 else 'ranks'} {listed}"


def _not_joined(error: OSError, timeout: float) -> Exception:
    if error.errno == errno.ESRCH:
        return PeerLost("joining: peer lost, a rank of this machine has ended")
    if error.errno == errno.ETIMEDOUT:
        return CollectiveTimeout(f"joining timed out: a rank of this machine has not come in {timeout:g} s")
    if error.errno == errno.ECONNABORTED:
        return GroupAborted("joining: the process group was aborted")
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return CallRefused(f"joining: {error.strerror}; a group takes one for each other rank", "ulimit -n 65536")
    return error
