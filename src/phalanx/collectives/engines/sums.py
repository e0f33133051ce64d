"""One piece of what all machines have, reduced by their leaders while they do something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .bundles import combine
from .engine import Op

SMALL = 1 << 16  # up to so many bytes every leader sends all that it has to every other


class Leaders(Protocol):
    """The engine across machines, as far as a sum needs it: who leads, and what goes between the leaders."""

    _leads: bool
    _machines: tuple[tuple[int, ...], ...]
    _mine: int  # this machine
    _others: list[int]
    _room: Any

    def _send(self, tensor: torch.Tensor, machine: int) -> Any: ...
    def _recv(self, tensor: torch.Tensor, machine: int) -> Any: ...
    def _wait(self, *works: Any) -> None: ...


class Sum:
    """Started when it is made, carried on by `reduce`, and over with `end`. Ranks that lead nothing do nothing."""

    def __init__(self, nodes: Leaders, mine: torch.Tensor, op: Op, name: str, along: Sequence[torch.Tensor]) -> None:
        self._nodes = nodes
        self.mine = mine  # the result in the end
        self._op = op
        self._works: list[Any] = []
        self._parts = list(along)
        self._chunks: Sequence[torch.Tensor] = ()
        if along or not nodes._leads:
            return
        machines = range(len(nodes._machines))
        if len(machines) > 2 and mine.nbytes > SMALL:  # each leader reduces a part, and then gives it to the others
            self._chunks = mine.tensor_split(len(machines))
            mine = self._chunks[nodes._mine]
        self._parts = [mine if n == nodes._mine else nodes._room.like(f"sum {name} of {n}", mine) for n in machines]
        self._works += [nodes._recv(self._parts[other], other) for other in nodes._others]
        self._works += [nodes._send(self._chunks[other] if self._chunks else mine, other) for other in nodes._others]

    def reduce(self) -> None:
        nodes = self._nodes
        if not nodes._leads:
            return
        nodes._wait(*self._works)
        mine = self._chunks[nodes._mine] if self._chunks else self.mine
        combine(mine, self._parts, self._op)
        if self._chunks:
            self._works = [nodes._recv(self._chunks[other], other) for other in nodes._others]
            self._works += [nodes._send(mine, other) for other in nodes._others]

    def end(self) -> None:
        if self._chunks:
            self._nodes._wait(*self._works)
