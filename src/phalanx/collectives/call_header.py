"""What a leader says of its call before anything else goes over the wires: gloo ends the process where sizes differ."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import torch

from .engines.engine import CallKind, EngineCall, Op, Reduction
from .errors import CollectiveMismatch

INLINE = 1 << 12  # bytes that travel along, so that a small reduction is one trip
_WORDS = struct.Struct("=8q")
_TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
_TYPES += [torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128]
_REDUCING = (CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER)
_ROOTED = (CallKind.REDUCE, CallKind.BROADCAST, CallKind.GATHER, CallKind.SCATTER)


class CallHeader:
    def __init__(self) -> None:
        self._memory = bytearray(_WORDS.size + INLINE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, count: int, call: EngineCall, along: torch.Tensor | None) -> None:
        _WORDS.pack_into(self._memory, 0, count, *_words(call))
        if along is not None:
            self.along(along).copy_(along)

    def along(self, like: torch.Tensor) -> torch.Tensor:
        """What travels along: as many of the same type."""
        begin = _WORDS.size
        return self.tensor[begin : begin + like.numel() * like.element_size()].view(like.dtype)

    @property
    def words(self) -> tuple[int, ...]:
        return _WORDS.unpack_from(self._memory)

    def __str__(self) -> str:
        _, kind, dtype, size, op, average, factor, root = self.words
        text = CallKind(kind).name.lower()
        if kind in _REDUCING:
            how = "AVG" if average else "PREMUL_SUM" if factor else Op(op).name
            text += f" of {size // _TYPES[dtype].itemsize} {str(_TYPES[dtype]).removeprefix('torch.')} ({how})"
        elif kind not in (CallKind.BARRIER, CallKind.ALL_TO_ALL):
            text += f" of {size} bytes{' in all' * (kind == CallKind.ALL_GATHER)}"
        if kind in _ROOTED:
            text += f" {'from' if kind in (CallKind.BROADCAST, CallKind.SCATTER) else 'to'} rank {root}"
        return text


def check(named: Callable[[Iterable[int]], str], heads: dict[int, CallHeader]) -> None:
    """`heads`: by rank. All leaders see the same, and say the same."""
    if len({head.words for head in heads.values()}) > 1:
        told = ", ".join(f"{named([rank])} {head}" for rank, head in heads.items())
        raise CollectiveMismatch(f"ranks called different things: {told}")


def travels(tensor: torch.Tensor) -> bool:
    return int(tensor.nbytes) <= INLINE


def _words(call: EngineCall) -> tuple[int, ...]:
    kind, how = call.kind, call.reduction or Reduction()
    tensor = next(iter(call.ins if kind in (CallKind.ALL_GATHER, CallKind.GATHER) else call.outs), None)
    if kind in (CallKind.BARRIER, CallKind.ALL_TO_ALL) or tensor is None:
        return kind, 0, 0, 0, 0, 0, 0
    parts = call.outs if kind == CallKind.ALL_GATHER else [tensor]  # ranks may give unequal parts there
    size, root = sum(part.numel() * part.element_size() for part in parts), call.root if kind in _ROOTED else 0
    if kind not in _REDUCING:
        return kind, 0, size, 0, 0, 0, root
    return kind, _TYPES.index(tensor.dtype), size, how.op, how.average, how.before != 1.0, root
