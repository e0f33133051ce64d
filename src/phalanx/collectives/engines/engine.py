"""The interface of engines, which copy and reduce data between ranks.

A process group (group.py) translates torch's calls to this interface. Engines implement it: shm.py in shared memory,
gloo.py without a compiler, hierarchical/ across hosts, mpi.py through MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch

ANY_SOURCE = -1


class CallKind(IntEnum):
    """The collectives. The numbers are those of native/phx.h."""

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
    """The reduce operations. The numbers are those of native/kernels.h."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction. It runs in rank order, and accumulates 16-bit floats in 32 bits: all engines return the same
    bits.
    """

    op: Op = Op.SUM
    scale: float = 1.0  # multiplies each input
    average: bool = False  # divide the result by the number of ranks; integers are truncated


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One collective. Tensors are contiguous, on the CPU, and written in place.

    ins, outs: zero, one, or one per rank, as the table in native/phx.h says. Where it says one per rank, a single
    tensor may stand for that many equal parts. Reductions take no complex numbers (the group views them as pairs);
    copies take any type.
    """

    kind: CallKind
    ins: Sequence[torch.Tensor] = ()
    outs: Sequence[torch.Tensor] = ()
    reduction: Reduction | None = None
    root: int = 0
    timeout: float = 0.0  # seconds; 0: none


class PendingCall(Protocol):
    """A call or message in progress."""

    def done(self) -> bool:
        """Return whether it has finished."""

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait until it has finished, or for `timeout` seconds (0: the timeout of the call). Return whether it has
        finished.

        Raises the error of the call.
        """

    @property
    def source(self) -> int:
        """The rank of the group that a received message came from."""


class Engine(Protocol):
    """Runs the collectives and messages of one group."""

    rank: int
    size: int

    def run(self, call: EngineCall) -> None:
        """Run a call, after all calls that were started before, and wait for it."""

    def start(self, call: EngineCall) -> PendingCall:
        """Start a call, in order with the others, and return."""

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> PendingCall:
        """Send a message."""

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> PendingCall:
        """Receive a message. `source` may be ANY_SOURCE. Messages of one rank and tag arrive in the order in which they
        were sent.
        """

    def abort(self) -> None:
        """Make waiting calls raise GroupAborted, on all ranks if possible. Thread-safe."""

    def close(self) -> None:
        """Release everything. No call may be in progress."""


def spread(tensors: Sequence[torch.Tensor], size: int) -> Sequence[torch.Tensor]:
    """Return one tensor per rank: a single one is split into equal parts."""
    if len(tensors) == 1 and size > 1:
        return tensors[0].view(-1).chunk(size) if tensors[0].numel() else [tensors[0]] * size
    return tensors


def as_bytes(tensor: torch.Tensor) -> Any:
    """View the memory of a tensor as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
