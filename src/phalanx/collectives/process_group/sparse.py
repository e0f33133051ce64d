"""all_reduce of sparse tensors: gathers the entries of all ranks and sums them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.engines.engine import CallKind, Engine, EngineCall
from phalanx.collectives.errors import CallRefused

from . import arguments, reductions

_SUM = hash(dist.ReduceOp.SUM)


def reduce(engine: Engine, name: str, tensor: torch.Tensor, op: Any, timeout: float) -> None:
    """Sum a sparse tensor over all ranks, always in the calling thread: the number of entries has to be exchanged
    first.
    """
    if name != "all_reduce" or tensor.layout is not torch.sparse_coo or hash(op) != _SUM:
        raise CallRefused(
            f"{name} ({reductions.name(op)}) of a tensor with layout {tensor.layout}: sparse tensors can be summed by "
            "all_reduce, nothing else",
            "tensor.to_dense()",
        )
    mine = arguments.check_cpu(tensor).detach().coalesce()
    counts = torch.empty(engine.size, dtype=torch.int64)
    engine.run(EngineCall(CallKind.ALL_GATHER, [torch.tensor([mine._nnz()])], [counts], timeout=timeout))
    entries = [mine.indices().t().contiguous(), mine.values().contiguous()]
    for at, ours in enumerate(entries):
        outs = [ours.new_empty((int(count), *ours.shape[1:])) for count in counts]
        engine.run(EngineCall(CallKind.ALL_GATHER, [ours], outs, timeout=timeout))
        entries[at] = torch.cat(outs)
    total = torch.sparse_coo_tensor(entries[0].t(), entries[1], tensor.shape, check_invariants=False).coalesce()
    arguments.copy_results([(tensor, total)])
