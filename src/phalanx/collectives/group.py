"""The process group that torch.distributed sees. It turns torch's calls into calls of an engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import arguments, monitored, reductions, registry, sparse
from .engines.engine import ANY_SOURCE, CallKind, Engine, EngineCall, PendingCall, Reduction
from .flight_recorder import FlightRecorder
from .work import DoneWork, FutureCompleter, FutureThreads, StartedWork

logger = logging.getLogger(__name__)

_Tensors = Sequence[torch.Tensor]
_Call = tuple[_Tensors, _Tensors]  # inputs, and the outputs that are written
_DONE = DoneWork()
_MESSAGE_FUTURES = FutureThreads()
_SHUTDOWN_WAIT = 2.0  # seconds that `shutdown` waits for calls that have not finished
_MAX_MESSAGES = 64  # open messages before finished ones are dropped
_CPU = torch.device("cpu")
_ROOTED = frozenset((CallKind.REDUCE, CallKind.BROADCAST, CallKind.GATHER, CallKind.SCATTER))
_REDUCES = frozenset((CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER))

_known = reductions.KNOWN
_names = reductions.NAMES
_strided = torch.strided


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor can be passed to an engine as it is. Complex tensors are passed as pairs of real
    numbers.
    """
    return tensor.layout is _strided and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


class EngineProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """EngineProcessGroup(name, engine, store, timeout, ranks): a process group for CPU tensors on top of an engine.
    Synchronous calls run in the calling thread. `ranks` are the global ranks of the group.
    """

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
        # If the engine has these methods, they are called directly, without an EngineCall.
        self._all_reduce: Callable[[Tensor, Reduction, float], None] | None = getattr(engine, "all_reduce", None)
        self._broadcast: Callable[[Tensor, int, float], None] | None = getattr(engine, "broadcast", None)
        self._barrier: Callable[[float], None] | None = getattr(engine, "barrier", None)
        self._completer = FutureCompleter()
        self._ranks = tuple(ranks) or tuple(range(engine.size))
        self._monitored = 0
        self._recorder = FlightRecorder(lambda: self._name, self._ranks)
        self._record = self._recorder.record
        self._started: deque[StartedWork] = deque()
        self._messages: list[StartedWork] = []
        self._batch: list[StartedWork] | None = None
        self._open = True
        registry.add(self)

    # -- identity

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return self._backend

    def _get_backend_name(self) -> str:
        return self._backend

    name = _get_backend_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name that torch gives the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name of the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description of the group."""
        return self._desc

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was created with."""
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
        """Do nothing: all ranks count from the same start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._recorder.enqueued

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for work in [*self._started, *self._messages]:
            work.wait()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of the group."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort all calls. Thread-safe."""
        self._engine.abort()
        self._completer.close()

    def shutdown(self) -> None:
        """Close the group, after a short wait for calls that have not finished."""
        if self._open:
            self._open = False
            self._wait_for_started()
            for work in [*self._started, *self._messages]:
                work.detach()
            self._engine.close()
            self._completer.close()
            self._recorder.close()

    def _wait_for_started(self) -> None:
        """Wait for calls that have not finished, so that the other ranks do not see a lost peer."""
        deadline = time.monotonic() + _SHUTDOWN_WAIT
        try:
            for work in [*self._started]:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except Exception:  # the calls after one that fails or times out do so, too
            logger.debug("a call failed while the group was closed", exc_info=True)

    # -- reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        if type(opts) is c10d.AllreduceOptions and len(tensors) == 1:
            tensor = tensors[0]
            if self._all_reduce is not None and not opts.asyncOp and self._batch is None:
                number = hash(opts.reduceOp)
                reduction = _known.get((tensor.dtype, number))
                if reduction is not None and _is_plain(tensor):
                    entry = self._record("all_reduce", tensors, tensors, reduction=_names[number])
                    given = opts.timeout
                    self._all_reduce(tensor, reduction, self._timeout if given.days < 0 else given.total_seconds())
                    entry.done = True
                    return _DONE
        else:
            tensors, opts = (
                arguments.as_list(tensors),
                arguments.as_options(c10d.AllreduceOptions, opts, timeout, reduceOp=op),
            )
        return self._run_calls("all_reduce", CallKind.ALL_REDUCE, [((), [tensor]) for tensor in tensors], opts)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        opts = arguments.as_options(c10d.AllreduceCoalescedOptions, opts)
        return self._run_calls("all_reduce", CallKind.ALL_REDUCE, [((), [tensor]) for tensor in tensors], opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        """Reduce the tensor over all ranks; only the root gets the result."""
        opts = arguments.as_options(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        return self._run_calls("reduce", CallKind.REDUCE, [((), arguments.as_list(tensors))], opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None
    ) -> dist.Work:
        """Reduce a list of tensors over all ranks; each rank gets one of them."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = arguments.as_options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        for ins, out in zip(inputs, outputs, strict=True):
            arguments.check_one_per_rank("reduce_scatter", "input", self._size, ins)
            if ins[self._rank].numel() != out.numel():
                raise ValueError(
                    f"reduce_scatter: the output has {out.numel()} elements, input {self._rank} of this rank "
                    f"{ins[self._rank].numel()}: expected the same number"
                )
        calls = [(ins, [out]) for ins, out in zip(inputs, outputs, strict=True)]
        return self._run_calls("reduce_scatter", CallKind.REDUCE_SCATTER, calls, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """Reduce one tensor over all ranks; each rank gets one equal part of it."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Run `reduce_scatter_single` for several pairs of tensors."""
        opts = arguments.as_options(c10d.ReduceScatterOptions, opts)
        for one, whole in zip(outputs, inputs, strict=True):
            arguments.check_whole("reduce_scatter", "input", whole, one, self._size)
        calls = [([whole], [one]) for one, whole in zip(outputs, inputs, strict=True)]
        return self._run_calls("reduce_scatter", CallKind.REDUCE_SCATTER, calls, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- copies

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        """Copy the root's tensors to all ranks."""
        tensors, opts = (
            arguments.as_list(tensors),
            arguments.as_options(c10d.BroadcastOptions, opts, timeout, rootRank=root),
        )
        if self._broadcast is not None and not opts.asyncOp and self._batch is None and len(tensors) == 1:
            tensor = tensors[0]
            if _is_plain(tensor):
                root = opts.rootRank
                entry = self._record("broadcast", tensors, tensors, root=root)
                self._broadcast(tensor, root, self._seconds(opts.timeout))
                entry.done = True
                return _DONE
        return self._run_calls("broadcast", CallKind.BROADCAST, [((), [tensor]) for tensor in tensors], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Gather one tensor of each rank into a list of tensors on all ranks."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = arguments.as_options(c10d.AllgatherOptions, opts, timeout)
        for outs, one in zip(outputs, inputs, strict=True):
            arguments.check_one_per_rank("all_gather", "output", self._size, outs)
            arguments.check_same("all_gather", outs[self._rank], one)
        calls = [([one], outs) for outs, one in zip(outputs, inputs, strict=True)]
        return self._run_calls("all_gather", CallKind.ALL_GATHER, calls, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """Gather one tensor of each rank into a single tensor on all ranks."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Run `all_gather_single` for several pairs of tensors."""
        opts = arguments.as_options(c10d.AllgatherOptions, opts)
        for whole, one in zip(outputs, inputs, strict=True):
            arguments.check_whole("all_gather", "output", whole, one, self._size)
        calls = [([one], [whole]) for whole, one in zip(outputs, inputs, strict=True)]
        return self._run_calls("all_gather", CallKind.ALL_GATHER, calls, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Gather several inputs. `outputs`: one list per rank, with one tensor per input."""
        opts = arguments.as_options(c10d.AllgatherOptions, opts)
        arguments.check_one_per_rank("all_gather_coalesced", "output list", self._size, outputs)
        for outs in outputs:
            if len(outs) != len(inputs):
                raise ValueError(
                    f"all_gather_coalesced: {len(inputs)} inputs and an output list of {len(outs)}: "
                    "invalid output size: expected the same number"
                )
        calls = [([one], [outs[at] for outs in outputs]) for at, one in enumerate(inputs)]
        for ins, outs in calls:
            arguments.check_same("all_gather_coalesced", outs[self._rank], ins[0])
        return self._run_calls("all_gather", CallKind.ALL_GATHER, calls, opts)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        """Gather one tensor of each rank into a list of tensors on the root."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = arguments.as_options(c10d.GatherOptions, opts, timeout, rootRank=root)
        outs = outputs[0] if outputs else ()
        if opts.rootRank == self._rank:
            arguments.check_one_per_rank("gather", "output", self._size, outs)
            arguments.check_same("gather", outs[self._rank], inputs[0])
        elif outs:
            raise ValueError("gather: an output was given on a rank that gathers nothing: requires empty output")
        return self._run_calls("gather", CallKind.GATHER, [(inputs, outs)], opts)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        """Give each rank one of the root's tensors."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = arguments.as_options(c10d.ScatterOptions, opts, timeout, rootRank=root)
        ins = inputs[0] if inputs else ()
        if opts.rootRank == self._rank:
            arguments.check_one_per_rank("scatter", "input", self._size, ins)
            arguments.check_same("scatter", ins[self._rank], outputs[0])
        elif ins:
            raise ValueError("scatter: inputs were given on a rank that scatters nothing: requires empty input")
        return self._run_calls("scatter", CallKind.SCATTER, [(ins, outputs)], opts)

    def alltoall(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Send one tensor to each rank and receive one from each."""
        arguments.check_one_per_rank("all_to_all", "output", self._size, outputs)
        arguments.check_one_per_rank("all_to_all", "input", self._size, inputs)
        opts = arguments.as_options(c10d.AllToAllOptions, opts, timeout)
        return self._run_calls("all_to_all", CallKind.ALL_TO_ALL, [(inputs, outputs)], opts)

    def all_to_all_single(  # noqa: PLR0917
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send a slice of the input to each rank and receive a slice of the output from each."""
        opts = arguments.as_options(c10d.AllToAllOptions, opts, timeout)
        send = arguments.split("input", self._size, input, input_split_sizes)
        receive = arguments.split("output", self._size, output, output_split_sizes)
        return self._run_calls("all_to_all", CallKind.ALL_TO_ALL, [(send, receive)], opts)

    alltoall_base = all_to_all_single

    # -- barriers

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Wait for all ranks."""
        opts = arguments.as_options(c10d.BarrierOptions, opts, timeout)
        if self._barrier is not None and not opts.asyncOp and self._batch is None:
            entry = self._record("barrier", (), ())
            self._barrier(self._seconds(opts.timeout))
            entry.done = True
            return _DONE
        return self._run_calls("barrier", CallKind.BARRIER, [((), ())], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks through the store. Name the ranks that do not arrive in time; the group stays usable."""
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        self._monitored += 1
        store = dist.PrefixStore(f"monitored/{self._monitored}", self._store)
        monitored.barrier(store, self._rank, self._ranks, seconds, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        works, self._batch = self._batch or [], None
        pendings = [pending for work in works for pending in work.pendings]
        tensors = [tensor for work in works for tensor in work.tensors]

        def after() -> None:
            for work in works:
                work.wait()

        return StartedWork("coalesced calls", pendings, tensors, self._completer, after=after)

    # -- messages

    def send(self, tensors: _Tensors, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Send a tensor to a rank of the group."""
        tensor = tensors[0]
        entry = self._record("send", tensors, (), peer=dstRank, tag=tag)
        data = arguments.contiguous(tensor)
        pending = self._engine.send(data, dstRank, tag, self._timeout)
        entry.pending = pending
        return self._message("send", pending, tensors, data)

    def recv(self, tensors: _Tensors, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receive a tensor from a rank of the group."""
        tensor = tensors[0]
        entry = self._record("recv", (), tensors, peer=srcRank, tag=tag)
        data = arguments.contiguous(tensor)
        pending = self._engine.recv(data, srcRank, tag, self._timeout)
        entry.pending = pending
        after = None if data is tensor else (lambda: arguments.copy_results([(tensor, data)]))
        return self._message("recv", pending, tensors, data, after)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank of the group."""
        return self.recv(tensors, ANY_SOURCE, tag)

    def _message(
        self,
        name: str,
        pending: PendingCall,
        tensors: _Tensors,
        data: Tensor,
        after: Callable[[], None] | None = None,
    ) -> StartedWork:
        work = StartedWork(name, [pending], tensors, _MESSAGE_FUTURES, after=after, keep=data)
        if self._batch is not None:
            self._batch.append(work)
        if len(self._messages) >= _MAX_MESSAGES:
            done = [message for message in self._messages if message.is_completed()]
            for message in done:
                message.detach()
            self._messages = [message for message in self._messages if message not in done]
        self._messages.append(work)
        return work

    # -- calls

    def _seconds(self, given: timedelta) -> float:
        return self._timeout if given.days < 0 else given.total_seconds()  # negative: not given

    def _run_calls(self, name: str, kind: CallKind, calls: Sequence[_Call], opts: Any) -> dist.Work:
        """Make one engine call per item and return one Work for all of them."""
        timeout = self._seconds(opts.timeout)
        root = opts.rootRank if kind in _ROOTED else 0
        op = opts.reduceOp if kind in _REDUCES else None
        async_op = opts.asyncOp or self._batch is not None
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
            return _DONE
        results = [out for _, outs in calls for out in outs]
        after = (lambda: arguments.copy_results(copies)) if copies else None
        work = StartedWork(name, pendings, results, self._completer, after=after, keep=kept)
        if self._batch is not None:
            self._batch.append(work)
        started = self._started
        while started and started[0].is_completed():
            started.popleft().detach()
        started.append(work)
        return work
