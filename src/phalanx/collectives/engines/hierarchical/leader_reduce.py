"""A pipelined reduction between the leaders of several hosts, one piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives.engines.engine import Op

from .buffers import BufferCache, combine
from .leaders import HostLeaders

SMALL = 1 << 16  # bytes up to which each leader sends everything to all others


class LeaderReduce:
    """One piece. It starts when created, continues with `reduce`, and finishes with `end`. Ranks other than leaders do
    nothing.
    """

    def __init__(
        self,
        leaders: HostLeaders,
        buffers: BufferCache,
        mine: torch.Tensor,
        op: Op,
        *,
        name: str,
        received: Sequence[torch.Tensor],
    ) -> None:
        self._leaders = leaders
        self.mine = mine  # the result in the end
        self._op = op
        self._works: list[Any] = []
        self._parts = list(received)
        self._chunks: Sequence[torch.Tensor] = ()
        if received or not leaders.leads:
            return
        hosts = range(len(leaders.hosts))
        if len(hosts) > 2 and mine.nbytes > SMALL:  # each leader reduces one chunk, and then sends it to the others
            self._chunks = mine.tensor_split(len(hosts))
            mine = self._chunks[leaders.mine]
        self._parts = [mine if n == leaders.mine else buffers.like(f"sum {name} of {n}", mine) for n in hosts]
        self._works += [leaders.recv(self._parts[other], other) for other in leaders.others]
        self._works += [leaders.send(self._chunks[other] if self._chunks else mine, other) for other in leaders.others]

    def reduce(self) -> None:
        """Reduce the received data, and start to distribute it."""
        leaders = self._leaders
        if not leaders.leads:
            return
        leaders.wait(*self._works)
        mine = self._chunks[leaders.mine] if self._chunks else self.mine
        combine(mine, self._parts, self._op)
        if self._chunks:
            self._works = [leaders.recv(self._chunks[other], other) for other in leaders.others]
            self._works += [leaders.send(mine, other) for other in leaders.others]

    def end(self) -> None:
        """Wait until the result is complete."""
        if self._chunks:
            self._leaders.wait(*self._works)
