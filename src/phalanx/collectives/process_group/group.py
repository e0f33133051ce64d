"""The process group that torch.distributed sees. It turns torch's calls into calls of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from phalanx.collectives import registry
from phalanx.collectives.engines.engine import ANY_SOURCE, CallKind, Engine, Reduction
from phalanx.collectives.flight_recorder import FlightRecorder
from phalanx.forkserver.signed_store import SignedStore

from . import arguments, monitored, reductions
from .engine_calls import DONE, EngineCalls, Tensors
from .work import FutureThreads, StartedWork

_MESSAGE_FUTURES = FutureThreads()
_CPU = torch.device("cpu")

_known = reductions.KNOWN
_names = reductions.NAMES
_strided = torch.strided


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor can be passed to an engine as it is. Complex tensors are passed as pairs of real
    numbers.
    """
    return tensor.layout is _strided and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


class EngineProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group for CPU tensors on top of an engine: EngineProcessGroup(name, engine, store, timeout, ranks).
    Synchronous calls run in the calling thread. `ranks` are the global ranks of the group.

    The methods are those that torch requires: one per collective and variant.
    """

    def __init__(
        self, name: str, engine: Engine, store: SignedStore, timeout: timedelta, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(engine.rank, engine.size)
        self._store = store.torch_store
        self._name = self._desc = ""
        self._backend = name
        self._engine = engine
        self._size = engine.size
        self._rank = engine.rank
        # If the engine has these methods, they are called directly, without an EngineCall.
        self._all_reduce: Callable[[Tensor, Reduction, float], None] | None = getattr(engine, "all_reduce", None)
        self._broadcast: Callable[[Tensor, int, float], None] | None = getattr(engine, "broadcast", None)
        self._barrier: Callable[[float], None] | None = getattr(engine, "barrier", None)
        names = tuple(ranks) or tuple(range(engine.size))
        self._monitored = monitored.MonitoredBarrier(store, engine.rank, names)
        recorder = FlightRecorder(lambda: self._name, names)
        self._record = recorder.record
        self._calls = EngineCalls(engine, recorder, timeout.total_seconds())
        self._works = self._calls.works
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
        return self._calls.enqueued

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._works.wait()

    @property
    def timeout_seconds(self) -> float:
        """The default timeout of the group."""
        return self._calls.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of the group."""
        self._calls.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort all calls. Thread-safe."""
        self._calls.abort()

    def shutdown(self) -> None:
        """Close the group, after a short wait for calls that have not finished."""
        if self._open:
            self._open = False
            self._calls.close()

    # -- reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        if type(opts) is c10d.AllreduceOptions and len(tensors) == 1:
            tensor = tensors[0]
            if self._all_reduce is not None and not opts.asyncOp and self._works.batch is None:
                number = hash(opts.reduceOp)
                reduction = _known.get((tensor.dtype, number))
                if reduction is not None and _is_plain(tensor):
                    entry = self._record("all_reduce", tensors, tensors, reduction=_names[number])
                    given = opts.timeout
                    self._all_reduce(
                        tensor, reduction, self._calls.timeout if given.days < 0 else given.total_seconds()
                    )
                    entry.done = True
                    return DONE
        else:
            tensors, opts = (
                arguments.as_list(tensors),
                arguments.as_options(c10d.AllreduceOptions, opts, timeout, reduceOp=op),
            )
        return self._calls.run("all_reduce", CallKind.ALL_REDUCE, [((), [tensor]) for tensor in tensors], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        opts = arguments.as_options(c10d.AllreduceCoalescedOptions, opts)
        return self._calls.run("all_reduce", CallKind.ALL_REDUCE, [((), [tensor]) for tensor in tensors], opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        """Reduce the tensor over all ranks; only the root gets the result."""
        opts = arguments.as_options(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        return self._calls.run("reduce", CallKind.REDUCE, [((), arguments.as_list(tensors))], opts)

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
        return self._calls.run("reduce_scatter", CallKind.REDUCE_SCATTER, calls, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """Reduce one tensor over all ranks; each rank gets one equal part of it."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Run `reduce_scatter_single` for several pairs of tensors."""
        opts = arguments.as_options(c10d.ReduceScatterOptions, opts)
        for one, whole in zip(outputs, inputs, strict=True):
            arguments.check_whole("reduce_scatter", "input", whole, one, self._size)
        calls = [([whole], [one]) for one, whole in zip(outputs, inputs, strict=True)]
        return self._calls.run("reduce_scatter", CallKind.REDUCE_SCATTER, calls, opts)

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
        if self._broadcast is not None and not opts.asyncOp and self._works.batch is None and len(tensors) == 1:
            tensor = tensors[0]
            if _is_plain(tensor):
                root = opts.rootRank
                entry = self._record("broadcast", tensors, tensors, root=root)
                self._broadcast(tensor, root, self._calls.seconds(opts.timeout))
                entry.done = True
                return DONE
        return self._calls.run("broadcast", CallKind.BROADCAST, [((), [tensor]) for tensor in tensors], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Gather one tensor of each rank into a list of tensors on all ranks."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = arguments.as_options(c10d.AllgatherOptions, opts, timeout)
        for outs, one in zip(outputs, inputs, strict=True):
            arguments.check_one_per_rank("all_gather", "output", self._size, outs)
            arguments.check_same("all_gather", outs[self._rank], one)
        calls = [([one], outs) for outs, one in zip(outputs, inputs, strict=True)]
        return self._calls.run("all_gather", CallKind.ALL_GATHER, calls, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """Gather one tensor of each rank into a single tensor on all ranks."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Run `all_gather_single` for several pairs of tensors."""
        opts = arguments.as_options(c10d.AllgatherOptions, opts)
        for whole, one in zip(outputs, inputs, strict=True):
            arguments.check_whole("all_gather", "output", whole, one, self._size)
        calls = [([one], [whole]) for whole, one in zip(outputs, inputs, strict=True)]
        return self._calls.run("all_gather", CallKind.ALL_GATHER, calls, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
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
        return self._calls.run("all_gather", CallKind.ALL_GATHER, calls, opts)

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
        return self._calls.run("gather", CallKind.GATHER, [(inputs, outs)], opts)

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
        return self._calls.run("scatter", CallKind.SCATTER, [(ins, outputs)], opts)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Send one tensor to each rank and receive one from each."""
        arguments.check_one_per_rank("all_to_all", "output", self._size, outputs)
        arguments.check_one_per_rank("all_to_all", "input", self._size, inputs)
        opts = arguments.as_options(c10d.AllToAllOptions, opts, timeout)
        return self._calls.run("all_to_all", CallKind.ALL_TO_ALL, [(inputs, outputs)], opts)

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
        return self._calls.run("all_to_all", CallKind.ALL_TO_ALL, [(send, receive)], opts)

    alltoall_base = all_to_all_single

    # -- barriers

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Wait for all ranks."""
        opts = arguments.as_options(c10d.BarrierOptions, opts, timeout)
        if self._barrier is not None and not opts.asyncOp and self._works.batch is None:
            entry = self._record("barrier", (), ())
            self._barrier(self._calls.seconds(opts.timeout))
            entry.done = True
            return DONE
        return self._calls.run("barrier", CallKind.BARRIER, [((), ())], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks through the store. Name the ranks that do not arrive in time; the group stays usable."""
        self._monitored.wait(self._calls.timeout if timeout is None else timeout.total_seconds(), wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._works.start_batch()

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        return self._works.end_batch()

    # -- messages

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Send a tensor to a rank of the group."""
        tensor = tensors[0]
        entry = self._record("send", tensors, (), peer=dstRank, tag=tag)
        data = arguments.contiguous(tensor)
        pending = self._engine.send(data, dstRank, tag, self._calls.timeout)
        entry.pending = pending
        work = StartedWork("send", [pending], tensors, _MESSAGE_FUTURES, keep=data)
        self._works.add_message(work)
        return work

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receive a tensor from a rank of the group."""
        tensor = tensors[0]
        entry = self._record("recv", (), tensors, peer=srcRank, tag=tag)
        data = arguments.contiguous(tensor)
        pending = self._engine.recv(data, srcRank, tag, self._calls.timeout)
        entry.pending = pending
        after = None if data is tensor else (lambda: arguments.copy_results([(tensor, data)]))
        work = StartedWork("recv", [pending], tensors, _MESSAGE_FUTURES, after=after, keep=data)
        self._works.add_message(work)
        return work

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank of the group."""
        return self.recv(tensors, ANY_SOURCE, tag)
