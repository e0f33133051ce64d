"""A pipelined reduction between the leaders of several hosts, one piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .buffers import combine
from .engine import Op

SMALL = 1 << 16  # bytes up to which each leader sends everything to all others


class Leaders(Protocol):
    """What a reduction needs of HierarchicalEngine: the leaders, and messages between them."""

    _leads: bool
    _hosts: tuple[tuple[int, ...], ...]
    _mine: int  # index of this host
    _others: list[int]
    _buffers: Any

    def _send(self, tensor: torch.Tensor, host: int) -> Any: ...
    def _recv(self, tensor: torch.Tensor, host: int) -> Any: ...
    def _wait(self, *works: Any) -> None: ...


class LeaderReduce:
    """One piece. It starts when created, continues with `reduce`, and finishes with `end`. Ranks that do not lead do
    nothing.
    """

    def __init__(
        self, leaders: Leaders, mine: torch.Tensor, op: Op, name: str, received: Sequence[torch.Tensor]
    ) -> None:
        self._leaders = leaders
        self.mine = mine  # the result in the end
        self._op = op
        self._works: list[Any] = []
        self._parts = list(received)
        self._chunks: Sequence[torch.Tensor] = ()
        if received or not leaders._leads:
            return
        hosts = range(len(leaders._hosts))
        if len(hosts) > 2 and mine.nbytes > SMALL:  # each leader reduces one chunk, and then sends it to the others
            self._chunks = mine.tensor_split(len(hosts))
            mine = self._chunks[leaders._mine]
        self._parts = [mine if n == leaders._mine else leaders._buffers.like(f"sum {name} of {n}", mine) for n in hosts]
        self._works += [leaders._recv(self._parts[other], other) for other in leaders._others]
        self._works += [
            leaders._send(self._chunks[other] if self._chunks else mine, other) for other in leaders._others
        ]

    def reduce(self) -> None:
        """Reduce what has arrived, and start to distribute it."""
        leaders = self._leaders
        if not leaders._leads:
            return
        leaders._wait(*self._works)
        mine = self._chunks[leaders._mine] if self._chunks else self.mine
        combine(mine, self._parts, self._op)
        if self._chunks:
            self._works = [leaders._recv(self._chunks[other], other) for other in leaders._others]
            self._works += [leaders._send(mine, other) for other in leaders._others]

    def end(self) -> None:
        """Wait until the result is complete."""
        if self._chunks:
            self._leaders._wait(*self._works)
