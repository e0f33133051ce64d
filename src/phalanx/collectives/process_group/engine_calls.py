"""Runs collectives of torch on an engine: prepares the tensors, records the calls, and returns a Work."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.collectives.engines.engine import CallKind, Engine, EngineCall, PendingCall
from phalanx.collectives.flight_recorder import FlightRecorder

from . import arguments, reductions, sparse
from .open_works import OpenWorks
from .work import DoneWork, FutureCompleter, StartedWork

Tensors = Sequence[Tensor]
TensorPair = tuple[Tensors, Tensors]  # inputs, and the outputs that are written
DONE = DoneWork()
_ROOTED = frozenset((CallKind.REDUCE, CallKind.BROADCAST, CallKind.GATHER, CallKind.SCATTER))
_REDUCES = frozenset((CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER))

_strided = torch.strided


class EngineCalls:
    """The calls of one group. `timeout`: seconds, for calls without their own."""

    def __init__(self, engine: Engine, recorder: FlightRecorder, timeout: float) -> None:
        self._engine = engine
        self._recorder = recorder
        self._record = recorder.record
        self._completer = FutureCompleter()
        self.timeout = timeout
        self.works = OpenWorks(self._completer)

    def seconds(self, given: timedelta) -> float:
        """Return the timeout of a call."""
        return self.timeout if given.days < 0 else given.total_seconds()  # negative: not given

    @property
    def enqueued(self) -> int:
        """The number of collectives called."""
        return self._recorder.enqueued

    def run(self, name: str, kind: CallKind, calls: Sequence[TensorPair], opts: Any) -> dist.Work:
        """Make one engine call per item and return one Work for all of them.

        Only methods of the group call this: the flight recorder treats the frames above them as the caller's.
        """
        timeout = self.seconds(opts.timeout)
        root = opts.rootRank if kind in _ROOTED else 0
        op = opts.reduceOp if kind in _REDUCES else None
        async_op = opts.asyncOp or self.works.batch is not None
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
                ins, outs = arguments.view_real(ins, op), arguments.view_real(outs, op)  # noqa: PLW2901
                reduction = reductions.find((ins or outs)[0].dtype, op)
            ins_ready = [arguments.contiguous(tensor) for tensor in ins]
            outs_ready = [arguments.contiguous(tensor) for tensor in outs]
            copies += [(out, copy) for out, copy in zip(outs, outs_ready, strict=True) if out is not copy]
            entry = self._record(name, ins, outs, reduction=reductions.name(op) if reduction else "", root=root)
            call = EngineCall(kind, ins_ready, outs_ready, reduction, root, timeout)
            if async_op:
                entry.pending = pending = self._engine.start(call)
                pendings.append(pending)
                kept.append(call)
            else:
                self._engine.run(call)
                entry.done = True
        if not async_op:
            arguments.copy_results(copies)
            return DONE
        results = [out for _, outs in calls for out in outs]
        after = (lambda: arguments.copy_results(copies)) if copies else None
        work = StartedWork(name, pendings, results, self._completer, after=after, keep=kept)
        self.works.add(work)
        return work

    def abort(self) -> None:
        """Abort all calls. Thread-safe."""
        self._engine.abort()
        self._completer.close()

    def close(self) -> None:
        """Close the engine, after a short wait for calls that have not finished."""
        self.works.close()
        self._engine.close()
        self._completer.close()
        self._recorder.close()
