"""What a process group stands on: memory that is moved and reduced between ranks, one call at a time.

A group (group.py) puts what torch asks for into these words; engines do it: shared.py in shared memory, plain.py
without a compiler, nodes.py across machines, mpi.py through MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch

ANYONE = -1


class CallKind(IntEnum):
    """Numbers are those of native/phx.h."""

    ALL_REDUCE = 0
    REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    GATHER = 4
    SCATTER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    BARRIER = 8


class Op(IntEnum):
    """Numbers are those of native/reduce.h."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6


@dataclass(frozen=True, slots=True)
class Reduction:
    """Always in the order of the ranks, 16-bit floats in 32 bits and rounded once: every engine has the same bits."""

    op: Op = Op.SUM
    before: float = 1.0  # times each input
    average: bool = False  # the result divided by the number of ranks; whole numbers towards zero


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One collective. Tensors are contiguous and on the CPU, and are written where they are.

    ins, outs: none, one, or one for each rank, as the table in native/phx.h says. Where that has one for each rank, one
    alone may stand for all: a whole of as many equal parts. Reductions have no complex numbers (the group shows them as
    pairs of real ones); what is merely moved may be of any type.
    """

    kind: CallKind
    ins: Sequence[torch.Tensor] = ()
    outs: Sequence[torch.Tensor] = ()
    reduction: Reduction | None = None
    root: int = 0
    timeout: float = 0.0  # seconds; 0: for ever


class PendingCall(Protocol):
    """Something under way."""

    def done(self) -> bool: ...

    def wait(self, timeout: float = 0.0) -> bool:
        """Until it is over, or so many seconds (0: as long as the call itself has). Whether it is.

        Raises what went wrong.
        """

    @property
    def source(self) -> int:
        """Of a message that has come: from which rank of the group."""


class Engine(Protocol):
    rank: int
    size: int

    def run(self, call: EngineCall) -> None:
        """Until it is done, after all that was started before."""

    def start(self, call: EngineCall) -> PendingCall:
        """Goes on while Python computes; in the order of the calls."""

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> PendingCall: ...

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> PendingCall:
        """`source` may be ANYONE. Messages of one rank and tag come in the order in which they were sent."""

    def abort(self) -> None:
        """From any thread: whoever waits raises GroupAborted, in every rank as far as that can be."""

    def close(self) -> None: ...


def spread(tensors: Sequence[torch.Tensor], size: int) -> Sequence[torch.Tensor]:
    """One for each rank, where one alone may stand for all."""
    if len(tensors) == 1 and size > 1:
        return tensors[0].view(-1).chunk(size) if tensors[0].numel() else [tensors[0]] * size
    return tensors


def as_bytes(tensor: torch.Tensor) -> Any:
    """The same memory, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # strides of one element alone may be anything
