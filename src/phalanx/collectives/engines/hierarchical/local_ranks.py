"""Collectives among the ranks of one host, as parts of collectives across hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.collectives.engines.engine import CallKind, Engine, EngineCall, Reduction

from .buffers import BufferCache
from .leaders import Deadline


class LocalRanks:
    """The ranks of this host, and the engine between them. Rank 0 of that engine is the leader."""

    def __init__(self, inner: Engine, count: int, buffers: BufferCache, deadline: Deadline) -> None:
        self._inner = inner
        self._count = count
        self._leads = inner.rank == 0
        self._buffers = buffers
        self._deadline = deadline

    def run(
        self,
        kind: CallKind,
        ins: Sequence[torch.Tensor] = (),
        outs: Sequence[torch.Tensor] = (),
        root: int = 0,
        reduction: Reduction | None = None,
    ) -> None:
        """Run a call on this host."""
        self._inner.run(EngineCall(kind, ins, outs, reduction, root, self._deadline.left()))

    def collect(self, name: str, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Collect the parts of this host's ranks at the leader. Parts may differ in size; empty on other ranks."""
        buffer = self._buffers.bytes(name, sum(sizes) if self._leads else 0)
        none = [buffer[:0]] * (self._count - 1)
        self.run(CallKind.ALL_TO_ALL, [part, *none], buffer.split(list(sizes)) if self._leads else [buffer[:0], *none])
        return buffer

    def distribute(self, parts: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Give each rank of this host its part from the leader. Parts may differ in size."""
        none = mine[:0]
        self.run(
            CallKind.ALL_TO_ALL,
            parts if self._leads else [none] * self._count,
            [mine] + [none] * (self._count - 1),
        )
