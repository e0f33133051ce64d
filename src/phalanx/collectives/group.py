"""What torch.distributed asks of a process group, put into the words of an engine."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import monitored, parts, reductions, registry, sparse
from .engines.engine import ANYONE, CallKind, Engine, EngineCall, PendingCall, Reduction
from .flight_recorder import FlightRecorder
from .torch_options import asked, listed
from .work import DetachedWork, DoneWork, StartedWork, Watcher

_Some = Sequence[torch.Tensor]
_Call = tuple[_Some, _Some]  # what goes in, and where what comes out is written
_OVER = DoneWork()
_APART = DetachedWork()
_LINGER = 2.0  # seconds, when the group ends, for what is under way
_MESSAGES = 64  # under way before those that are over are let go
_CPU = torch.device("cpu")
_ROOTED = frozenset((CallKind.REDUCE, CallKind.BROADCAST, CallKind.GATHER, CallKind.SCATTER))
_REDUCES = frozenset((CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER))

_known = reductions.KNOWN
_names = reductions.NAMES
_strided = torch.strided


def _plain(tensor: Tensor) -> bool:
    """Its memory is what it shows. Complex ones come as pairs."""
    return tensor.layout is _strided and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


class EngineProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Ranks and tensors of the CPU, over one engine. What is not async is done in the calling thread."""

    def __init__(
        self, name: str, engine: Engine, store: dist.Store, timeout: timedelta, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(engine.rank, engine.size)
        self._store = store
        self._name = self._desc = ""
        self._backend = name
        self._engine = engine
        self._size = engine.size
        self._rank = engine.rank
        self._timeout = timeout.total_seconds()
        # Where the engine takes these as they are, no Call is made for them.
        self._all_reduce: Callable[[Tensor, Reduction, float], None] | None = getattr(engine, "all_reduce", None)
        self._broadcast: Callable[[Tensor, int, float], None] | None = getattr(engine, "broadcast", None)
        self._barrier: Callable[[float], None] | None = getattr(engine, "barrier", None)
        self._watcher = Watcher()
        self._ranks = tuple(ranks) or tuple(range(engine.size))
        self._monitored = 0
        self._journal = FlightRecorder(lambda: self._name, self._ranks)
        self._enter = self._journal.enter
        self._started: deque[StartedWork] = deque()
        self._messages: list[StartedWork] = []
        self._batch: list[StartedWork] | None = None
        self._open = True
        registry.add(self)

    # -- who it is

    def getBackendName(self) -> str:  # noqa: N802
        return self._backend

    def _get_backend_name(self) -> str:
        return self._backend

    name = _get_backend_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> EngineProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    supports_splitting = False
    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = False

    def _set_sequence_number_for_group(self) -> None:
        """Ranks count alike from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._journal.enqueued

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for work in [*self._started, *self._messages]:
            work.wait()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        self._engine.abort()
        self._watcher.close()

    def shutdown(self) -> None:
        if self._open:
            self._open = False
            self._linger()
            for work in [*self._started, *self._messages]:
                work.end()
            self._engine.close()
            self._watcher.close()
            self._journal.close()

    def _linger(self) -> None:
        """Who leaves has done its part of what all have called, or the others would be told that it has gone."""
        until = time.monotonic() + _LINGER
        with contextlib.suppress(Exception):  # one that fails, or for which nobody comes: so do all after it
            for work in [*self._started]:
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))

    # -- reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None) -> dist.Work:
        if type(opts) is c10d.AllreduceOptions and len(tensors) == 1:
            tensor = tensors[0]
            if self._all_reduce is not None and not opts.asyncOp and self._batch is None:
                number = hash(opts.reduceOp)
                reduction = _known.get((tensor.dtype, number))
                if reduction is not None and _plain(tensor):
                    entry = self._enter("all_reduce", tensors, tensors, reduction=_names[number])
                    asked_for = opts.timeout
                    self._all_reduce(
                        tensor, reduction, self._timeout if asked_for.days < 0 else asked_for.total_seconds()
                    )
                    entry.done = True
                    return _OVER
        else:
            tensors, opts = listed(tensors), asked(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
        return self._each("all_reduce", CallKind.ALL_REDUCE, [((), [tensor]) for tensor in tensors], opts)

    def allreduce_coalesced(self, tensors: _Some, opts: Any = None) -> dist.Work:
        opts = asked(c10d.AllreduceCoalescedOptions, opts)
        return self._each("all_reduce", CallKind.ALL_REDUCE, [((), [tensor]) for tensor in tensors], opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        opts = asked(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        return self._each("reduce", CallKind.REDUCE, [((), listed(tensors))], opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None
    ) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = asked(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        for ins, out in zip(inputs, outputs, strict=True):
            parts.one_for_each("reduce_scatter", "input", self._size, ins)
            if ins[self._rank].numel() != out.numel():
                raise ValueError(
                    f"reduce_scatter: the output has {out.numel()} elements, input {self._rank} of this rank "
                    f"{ins[self._rank].numel()}: they have to be as many"
                )
        calls = [(ins, [out]) for ins, out in zip(inputs, outputs, strict=True)]
        return self._each("reduce_scatter", CallKind.REDUCE_SCATTER, calls, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: _Some, inputs: _Some, opts: Any = None) -> dist.Work:
        opts = asked(c10d.ReduceScatterOptions, opts)
        for one, whole in zip(outputs, inputs, strict=True):
            parts.whole("reduce_scatter", "input", whole, one, self._size)
        calls = [([whole], [one]) for one, whole in zip(outputs, inputs, strict=True)]
        return self._each("reduce_scatter", CallKind.REDUCE_SCATTER, calls, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moves

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        tensors, opts = listed(tensors), asked(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        if self._broadcast is not None and not opts.asyncOp and self._batch is None and len(tensors) == 1:
            tensor = tensors[0]
            if _plain(tensor):
                root = opts.rootRank
                entry = self._enter("broadcast", tensors, tensors, root=root)
                self._broadcast(tensor, root, self._seconds(opts.timeout))
                entry.done = True
                return _OVER
        return self._each("broadcast", CallKind.BROADCAST, [((), [tensor]) for tensor in tensors], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = asked(c10d.AllgatherOptions, opts, timeout)
        for outs, one in zip(outputs, inputs, strict=True):
            parts.one_for_each("all_gather", "output", self._size, outs)
            parts.alike("all_gather", outs[self._rank], one)
        calls = [([one], outs) for outs, one in zip(outputs, inputs, strict=True)]
        return self._each("all_gather", CallKind.ALL_GATHER, calls, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: _Some, inputs: _Some, opts: Any = None) -> dist.Work:
        opts = asked(c10d.AllgatherOptions, opts)
        for whole, one in zip(outputs, inputs, strict=True):
            parts.whole("all_gather", "output", whole, one, self._size)
        calls = [([one], [whole]) for whole, one in zip(outputs, inputs, strict=True)]
        return self._each("all_gather", CallKind.ALL_GATHER, calls, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[_Some], inputs: _Some, opts: Any = None) -> dist.Work:
        """`outputs`: of each rank, for each input."""
        opts = asked(c10d.AllgatherOptions, opts)
        parts.one_for_each("all_gather_coalesced", "output list", self._size, outputs)
        for outs in outputs:
            if len(outs) != len(inputs):
                raise ValueError(
                    f"all_gather_coalesced: {len(inputs)} inputs and an output list of {len(outs)}: "
                    "invalid output size: they have to be as many"
                )
        calls = [([one], [outs[at] for outs in outputs]) for at, one in enumerate(inputs)]
        for ins, outs in calls:
            parts.alike("all_gather_coalesced", outs[self._rank], ins[0])
        return self._each("all_gather", CallKind.ALL_GATHER, calls, opts)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = asked(c10d.GatherOptions, opts, timeout, rootRank=root)
        outs = outputs[0] if outputs else ()
        if opts.rootRank == self._rank:
            parts.one_for_each("gather", "output", self._size, outs)
            parts.alike("gather", outs[self._rank], inputs[0])
        elif outs:
            raise ValueError("gather: an output was given on a rank that gathers nothing: requires empty output")
        return self._each("gather", CallKind.GATHER, [(inputs, outs)], opts)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = asked(c10d.ScatterOptions, opts, timeout, rootRank=root)
        ins = inputs[0] if inputs else ()
        if opts.rootRank == self._rank:
            parts.one_for_each("scatter", "input", self._size, ins)
            parts.alike("scatter", ins[self._rank], outputs[0])
        elif ins:
            raise ValueError("scatter: inputs were given on a rank that scatters nothing: requires empty input")
        return self._each("scatter", CallKind.SCATTER, [(ins, outputs)], opts)

    def alltoall(self, outputs: _Some, inputs: _Some, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        parts.one_for_each("all_to_all", "output", self._size, outputs)
        parts.one_for_each("all_to_all", "input", self._size, inputs)
        opts = asked(c10d.AllToAllOptions, opts, timeout)
        return self._each("all_to_all", CallKind.ALL_TO_ALL, [(inputs, outputs)], opts)

    def all_to_all_single(  # noqa: PLR0917
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        opts = asked(c10d.AllToAllOptions, opts, timeout)
        there = parts.split("input", self._size, input, input_split_sizes)
        here = parts.split("output", self._size, output, output_split_sizes)
        return self._each("all_to_all", CallKind.ALL_TO_ALL, [(there, here)], opts)

    alltoall_base = all_to_all_single

    # -- meetings

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        opts = asked(c10d.BarrierOptions, opts, timeout)
        if self._barrier is not None and not opts.asyncOp and self._batch is None:
            entry = self._enter("barrier", (), ())
            self._barrier(self._seconds(opts.timeout))
            entry.done = True
            return _OVER
        return self._each("barrier", CallKind.BARRIER, [((), ())], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Through the store: whoever has not come in time is named, and the group goes on."""
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        self._monitored += 1
        store = dist.PrefixStore(f"monitored/{self._monitored}", self._store)
        monitored.hold(store, self._rank, self._ranks, seconds, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        works, self._batch = self._batch or [], None
        pendings = [pending for work in works for pending in work.pendings]
        tensors = [tensor for work in works for tensor in work.tensors]

        def after() -> None:
            for work in works:
                work.wait()

        return StartedWork("coalesced calls", pendings, tensors, self._watcher, after=after)

    # -- messages

    def send(self, tensors: _Some, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        tensor = tensors[0]
        entry = self._enter("send", tensors, (), peer=dstRank, tag=tag)
        data = parts.dense(tensor)
        pending = self._engine.send(data, dstRank, tag, self._timeout)
        entry.pending = pending
        return self._message("send", pending, tensors, data)

    def recv(self, tensors: _Some, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        tensor = tensors[0]
        entry = self._enter("recv", (), tensors, peer=srcRank, tag=tag)
        data = parts.dense(tensor)
        pending = self._engine.recv(data, srcRank, tag, self._timeout)
        entry.pending = pending
        after = None if data is tensor else (lambda: parts.copy([(tensor, data)]))
        return self._message("recv", pending, tensors, data, after)

    def recv_anysource(self, tensors: _Some, tag: int = 0) -> dist.Work:
        return self.recv(tensors, ANYONE, tag)

    def _message(
        self,
        name: str,
        pending: PendingCall,
        tensors: _Some,
        data: Tensor,
        after: Callable[[], None] | None = None,
    ) -> StartedWork:
        work = StartedWork(name, [pending], tensors, _APART, after=after, keep=data)
        if self._batch is not None:
            self._batch.append(work)
        if len(self._messages) >= _MESSAGES:
            over = [message for message in self._messages if message.is_completed()]
            for message in over:
                message.end()
            self._messages = [message for message in self._messages if message not in over]
        self._messages.append(work)
        return work

    # -- how it is done

    def _seconds(self, asked_for: timedelta) -> float:
        return self._timeout if asked_for.days < 0 else asked_for.total_seconds()  # less than none: not asked for

    def _each(self, name: str, kind: CallKind, calls: Sequence[_Call], opts: Any) -> dist.Work:
        """One call after the other, and one Work for all of them."""
        timeout = self._seconds(opts.timeout)
        root = opts.rootRank if kind in _ROOTED else 0
        op = opts.reduceOp if kind in _REDUCES else None
        later = opts.asyncOp or self._batch is not None
        pendings: list[PendingCall] = []
        copies: list[tuple[Tensor, Tensor]] = []
        kept: list[Any] = []
        for ins, outs in calls:
            reduction = None
            if op is not None:
                first = (ins or outs)[0]
                if first.layout is not _strided:
                    sparse.reduce(self._engine, name, first, op, timeout)
                    continue
                ins, outs = parts.real(ins, op), parts.real(outs, op)  # noqa: PLW2901
                reduction = reductions.find((ins or outs)[0].dtype, op)
            given = [parts.dense(tensor) for tensor in ins]
            taken = [parts.dense(tensor) for tensor in outs]
            copies += [(out, copy) for out, copy in zip(outs, taken, strict=True) if out is not copy]
            entry = self._enter(name, ins, outs, reduction=reductions.name(op) if reduction else "", root=root)
            call = EngineCall(kind, given, taken, reduction, root, timeout)
            if later:
                entry.pending = pending = self._engine.start(call)
                pendings.append(pending)
                kept.append(call)
            else:
                self._engine.run(call)
                entry.done = True
        if not later:
            parts.copy(copies)
            return _OVER
        results = [out for _, outs in calls for out in outs]
        after = (lambda: parts.copy(copies)) if copies else None
        work = StartedWork(name, pendings, results, self._watcher, after=after, keep=kept)
        if self._batch is not None:
            self._batch.append(work)
        started = self._started
        while started and started[0].is_completed():
            started.popleft().end()
        started.append(work)
        return work
