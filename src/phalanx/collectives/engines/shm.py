"""The engine in shared memory. C code copies and reduces; this module passes addresses and turns results into
errors.
"""

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
from phalanx.collectives.engines.engine import ANY_SOURCE, CallKind, EngineCall, Op, Reduction
from phalanx.collectives.errors import CallRefused, CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost
from phalanx.collectives.neighbours import format_ranks
from phalanx.forkserver.signed_store import SignedStore

# The numbers of native/kernels.h. Copies take other types too: one number for all of them.
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

# Results, in native/phx.h
_DEAD, _TIMEOUT, _ABORTED, _MISMATCH = 1, 2, 3, 4

_FROM_ROOT = {CallKind.BROADCAST, CallKind.SCATTER}
_TO_ROOT = {CallKind.REDUCE, CallKind.GATHER}
_REDUCTIONS = {CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER}


def join(store: SignedStore, rank: int, here: Sequence[int], ranks: Sequence[int], timeout: float) -> ShmEngine:
    """Create the engine of `rank`. `here`: the group's ranks on this host. `ranks`: their global ranks."""
    fd, pids = segment.create(store, rank, here, timeout)
    try:
        engine = ShmEngine(fd, here.index(rank), pids, ranks, timeout)
    finally:
        os.close(fd)
    names = dict(zip(here, ranks, strict=True))
    engine.make_mismatch = lambda text: mismatch.make_error(text, store, rank, names)
    return engine


class ShmEngine:
    """An Engine. Has all_reduce, broadcast and barrier methods that need no EngineCall."""

    def __init__(
        self,
        fd: int,
        rank: int,
        pids: Sequence[int],
        ranks: Sequence[int],
        timeout: float,
        *,
        slot: int = segment.SLOT,
        direct: bool = True,  # read peer memory, if the kernel allows it to all ranks
    ) -> None:
        self.make_mismatch: Callable[[str], dist.DistBackendError] = (
            CollectiveMismatch  # makes the error for calls that do not match
        )
        self.rank = rank
        self.size = len(pids)
        self._ranks = ranks
        self._running: deque[tuple[int, EngineCall]] = deque()  # calls whose tensors the group's thread may still use
        self._first_error: dist.DistBackendError | None = None
        self._region_count = 0
        self._dropped: list[tuple[int, torch.Tensor]] = []  # messages in progress whose handle was dropped
        try:
            self._group = _native.join(fd, rank, self.size, slot, pids, direct, _ms(timeout))
        except OSError as error:
            raise _not_joined(error, timeout) from None
        # Also at interpreter exit: the thread must not outlive the tensors.
        self._leave = weakref.finalize(self, _native.leave, self._group)

    # -- without an EngineCall

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, timeout: float) -> None:
        """Reduce a tensor over all ranks, in place."""
        result = _native.all_reduce(
            self._group,
            tensor.data_ptr(),
            tensor.numel(),
            DTYPES.get(tensor.dtype, OTHER),
            reduction.op,
            reduction.scale,
            reduction.average,
            _ms(timeout),
        )
        if result:
            raise self._error(result, "all_reduce", timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float) -> None:
        """Copy the root's tensor to all ranks."""
        dtype = DTYPES.get(tensor.dtype, OTHER)
        result = _native.broadcast(self._group, tensor.data_ptr(), tensor.nbytes, dtype, root, _ms(timeout))
        if result:
            raise self._error(result, "broadcast", timeout)

    def barrier(self, timeout: float) -> None:
        """Wait for all ranks."""
        result = _native.barrier(self._group, _ms(timeout))
        if result:
            raise self._error(result, "barrier", timeout)

    # -- Engine

    def run(self, call: EngineCall) -> None:
        """Run a call, after all that were started before."""
        result = _native.run(self._group, *self._native_args(call))
        if result:
            raise self._error(result, call.kind.name.lower(), call.timeout)

    def start(self, call: EngineCall) -> StartedCall:
        """Start a call in the group's thread."""
        while self._running and _native.done(self._group, self._running[0][0]):
            self._running.popleft()
        ticket = _native.start(self._group, *self._native_args(call))
        self._running.append((ticket, call))
        return StartedCall(self, ticket, call)

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> ShmMessage:
        """Send a message."""
        if self._dropped:
            self._free_dropped()
        ticket = _native.send(self._group, tensor.data_ptr(), tensor.nbytes, to, tag, _ms(timeout))
        return ShmMessage(self, "send", ticket, tensor, peer=to, tag=tag, timeout=timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> ShmMessage:
        """Receive a message."""
        if self._dropped:
            self._free_dropped()
        ticket = _native.recv(self._group, tensor.data_ptr(), tensor.nbytes, source, tag, _ms(timeout))
        return ShmMessage(self, "recv", ticket, tensor, peer=source, tag=tag, timeout=timeout)

    def abort(self) -> None:
        """Abort the group on all ranks."""
        if self._leave.alive:
            _native.abort(self._group)

    def close(self) -> None:
        """Leave the group."""
        if self._leave():  # otherwise the group's thread may still write: the tensors are freed with this object
            self._running.clear()

    # -- regions (regions.py)

    def add_region(self, size: int, places: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Add a region. `places`: per rank, its address here and in its own process. Called by all ranks together.
        Return a function that removes it.
        """
        self._region_count += 1
        _native.add_region(self._group, self._region_count, size, tuple(word for place in places for word in place))
        return functools.partial(_remove_region, self._group, self._region_count)

    def _free_dropped(self) -> None:
        """Free the tensors of messages that have finished."""
        dropped, self._dropped = self._dropped, []
        for ticket, tensor in dropped:
            if _native.p2p_done(self._group, ticket):
                _native.p2p_wait(self._group, ticket, 0)
            else:
                self._dropped.append((ticket, tensor))

    def _native_args(self, call: EngineCall) -> tuple[object, ...]:
        first = call.outs[0] if call.outs else call.ins[0] if call.ins else None
        dtype = 0 if first is None else DTYPES.get(first.dtype, OTHER)
        how = call.reduction or _SUM
        ins = _parts(call.ins, self.size if call.kind in _INS_PER_RANK else 1)
        outs = _parts(call.outs, self.size if call.kind in _OUTS_PER_RANK else 1)
        return call.kind, dtype, how.op, call.root, how.scale, how.average, _ms(call.timeout), ins, outs

    # -- errors

    def _error(self, result: int, what: str, timeout: float) -> dist.DistBackendError:
        if self._first_error:
            return type(self._first_error)(f"{what}: this group has failed before: {self._first_error}")
        self._first_error = self._make_error(result, what, timeout)
        return self._first_error

    def _make_error(self, result: int, what: str, timeout: float) -> dist.DistBackendError:
        if result == _MISMATCH:
            return self.make_mismatch(self._describe_mismatch())
        if result == _ABORTED:
            return GroupAborted(f"{what}: the process group was aborted")
        failed = _native.failed_ranks(self._group)
        who = self._format_ranks(failed)
        if result == _DEAD:
            return PeerLost(f"{what}: peer lost, {who} {'has' if len(failed) == 1 else 'have'} ended")
        if result == _TIMEOUT and self.rank in failed:
            return CollectiveTimeout(f"{what}: this rank arrived too late: the others timed out waiting for {who}")
        if result == _TIMEOUT:
            return CollectiveTimeout(f"{what}: {who} did not come within the timeout of {timeout:g} s")
        return GroupAborted(f"{what}: the kernel no longer lets a rank read the memory of a peer")

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        return format_ranks(ranks, self._ranks)

    def _describe_mismatch(self) -> str:
        calls: dict[str, list[int]] = {}
        for rank in range(self.size):
            calls.setdefault(self._describe(*_native.signature(self._group, rank)), []).append(rank)
        if len(calls) == 1:
            but = "the size that one rank sends is not the size that another receives"
            if _native.signature(self._group, self.rank)[0] in (
                CallKind.ALL_REDUCE,
                CallKind.REDUCE,
            ):  # sizes are compared there
                but = "some with the average (AVG), or with another factor (PREMUL_SUM)"
            return f"ranks called {next(iter(calls))}, but {but}"
        return "ranks called different things: " + ", ".join(
            f"{self._format_ranks(who)} {what}" for what, who in calls.items()
        )

    def _describe(  # noqa: PLR0917
        self, kind: int, dtype: int, op: int, root: int, average: int, bytes_: int, scale: float
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
            text += f" ({'AVG' if average else Op(op).name}{f' of {scale:g} times each' if scale != 1 else ''})"
        if kind in _FROM_ROOT:
            text += f" from {self._format_ranks([root])}"
        if kind in _TO_ROOT:
            text += f" to {self._format_ranks([root])}"
        return text


class StartedCall:
    """A collective in progress in the group's thread."""

    source = -1

    def __init__(self, engine: ShmEngine, ticket: int, call: EngineCall) -> None:
        self._engine = engine
        self._ticket = ticket
        self._call = call

    def done(self) -> bool:
        """Return whether the call has finished."""
        return bool(_native.done(self._engine._group, self._ticket))

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait for the call; return whether it has finished."""
        result = _native.wait(self._engine._group, self._ticket, _ms(timeout))
        if result > 0:
            raise self._engine._error(result, self._call.kind.name.lower(), self._call.timeout)
        return result == 0


def _remove_region(group: _native.Group, number: int) -> None:
    with contextlib.suppress(ValueError):  # the group was left, or belongs to another process
        _native.remove_region(group, number)


class ShmMessage:
    """A message in progress."""

    def __init__(
        self, engine: ShmEngine, what: str, ticket: int, tensor: torch.Tensor, *, peer: int, tag: int, timeout: float
    ) -> None:
        self.source = peer
        self._engine = engine
        self._what = what
        self._ticket = ticket
        self._tensor = tensor  # others may read or write it until it is done
        self._tag = tag
        self._timeout = timeout
        self._done = False
        self._lock = threading.RLock()  # the result is returned once
        self._error: dist.DistBackendError | None = None

    def __del__(self) -> None:
        if not self._done and self._ticket > _SENT:
            self._engine._dropped.append((self._ticket, self._tensor))

    def done(self) -> bool:
        """Return whether the message has been transferred."""
        return self._done or bool(_native.p2p_done(self._engine._group, self._ticket))

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait for the message; return whether it has been transferred."""
        if not self._done and not self._error:
            if not self._lock.acquire(timeout=timeout or -1):
                return False
            try:
                if not self._done and not self._error and not self._finish(timeout):
                    return False
            finally:
                self._lock.release()
        if self._error:
            raise self._error
        return True

    def _finish(self, timeout: float) -> bool:
        try:
            result, peer, size = _native.p2p_wait(self._engine._group, self._ticket, _ms(timeout))
        except BaseException:  # raised by a signal handler: the request was cancelled
            self._error = GroupAborted(f"{self._what} was interrupted")
            raise
        if result > 0:
            self._error = self._make_error(result, peer, size)
        elif result == 0 and self._what == "recv":
            self.source = peer
        self._done = result >= 0
        return self._done

    def _make_error(self, result: int, peer: int, size: int) -> dist.DistBackendError:
        engine, what = self._engine, self._what
        if result == _MISMATCH:
            mine, who = self._tensor.nbytes, engine._format_ranks([peer])
            if what == "recv":
                return CollectiveMismatch(f"recv of {mine} bytes from {who}: it sent {size} bytes (tag {self._tag})")
            return CollectiveMismatch(f"send of {mine} bytes to {who}: it receives {size} bytes (tag {self._tag})")
        if result == _DEAD and peer >= 0:
            return PeerLost(f"{what}: peer lost, {engine._format_ranks([peer])} has ended")
        if result == _DEAD and self.source == ANY_SOURCE and not _native.failed_ranks(engine._group):
            return PeerLost(f"{what}: peer lost, all other ranks have ended")
        if result == _TIMEOUT and (peer >= 0 or self.source == ANY_SOURCE):
            who = engine._format_ranks([peer]) if peer >= 0 else "any rank"
            return CollectiveTimeout(f"{what} timed out: it waited {self._timeout:g} s for {who} (tag {self._tag})")
        return engine._error(result, what, self._timeout)


_SENT = 1  # the ticket of a send that was complete immediately: native/p2p.c
_SUM = Reduction()
_INS_PER_RANK = {CallKind.SCATTER, CallKind.REDUCE_SCATTER, CallKind.ALL_TO_ALL}
_OUTS_PER_RANK = {CallKind.ALL_GATHER, CallKind.GATHER, CallKind.ALL_TO_ALL}


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000)) if seconds > 0 else 0


def _parts(tensors: Sequence[torch.Tensor], wanted: int) -> tuple[int, ...]:
    """Return address and size of each tensor; a single one may stand for that many equal parts."""
    if len(tensors) == 1 and wanted > 1:
        at, each = tensors[0].data_ptr(), tensors[0].nbytes // wanted
        return tuple(word for part in range(wanted) for word in (at + part * each, each))
    return tuple(word for tensor in tensors for word in (tensor.data_ptr(), tensor.nbytes))


def _not_joined(error: OSError, timeout: float) -> Exception:
    if error.errno == errno.ESRCH:
        return PeerLost("joining: peer lost, a rank of this host has ended")
    if error.errno == errno.ETIMEDOUT:
        return CollectiveTimeout(f"joining timed out: a rank of this host did not join within {timeout:g} s")
    if error.errno == errno.ECONNABORTED:
        return GroupAborted("joining: the process group was aborted")
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return CallRefused(f"joining: {error.strerror}; a group needs one file descriptor per peer", "ulimit -n 65536")
    return error
