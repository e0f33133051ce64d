"""The header that a leader sends before a call's data: gloo kills the process if sizes do not match."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import torch

from phalanx.collectives.engines.engine import CallKind, EngineCall, Op, Reduction
from phalanx.collectives.errors import CollectiveMismatch

INLINE = 1 << 12  # bytes that are sent with the header, so that a small reduction takes one round trip
_FIELDS = struct.Struct("=8q")
_TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
_TYPES += [torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128]
_REDUCING = (CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER)
_ROOTED = (CallKind.REDUCE, CallKind.BROADCAST, CallKind.GATHER, CallKind.SCATTER)


class CallHeader:
    """A buffer for one header and the data that is sent with it."""

    def __init__(self) -> None:
        self._memory = bytearray(_FIELDS.size + INLINE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, count: int, call: EngineCall, payload: torch.Tensor | None) -> None:
        """Write the header of call number `count`, and the data."""
        _FIELDS.pack_into(self._memory, 0, count, *_fields(call))
        if payload is not None:
            self.payload(payload).copy_(payload)

    def payload(self, like: torch.Tensor) -> torch.Tensor:
        """Return the part of the buffer for data sent with the header: as many elements, of the same type."""
        begin = _FIELDS.size
        return self.tensor[begin : begin + like.numel() * like.element_size()].view(like.dtype)

    @property
    def fields(self) -> tuple[int, ...]:
        """The header as integers."""
        return _FIELDS.unpack_from(self._memory)

    def __str__(self) -> str:
        _, kind, dtype, size, op, average, factor, root = self.fields
        text = CallKind(kind).name.lower()
        if kind in _REDUCING:
            how = "AVG" if average else "PREMUL_SUM" if factor else Op(op).name
            text += f" of {size // _TYPES[dtype].itemsize} {str(_TYPES[dtype]).removeprefix('torch.')} ({how})"
        elif kind not in (CallKind.BARRIER, CallKind.ALL_TO_ALL):
            text += f" of {size} bytes{' in all' * (kind == CallKind.ALL_GATHER)}"
        if kind in _ROOTED:
            text += f" {'from' if kind in (CallKind.BROADCAST, CallKind.SCATTER) else 'to'} rank {root}"
        return text


def check_match(format_ranks: Callable[[Iterable[int]], str], headers: dict[int, CallHeader]) -> None:
    """Raise CollectiveMismatch unless all headers are equal. `headers`: by rank. All leaders get the same result."""
    if len({header.fields for header in headers.values()}) > 1:
        calls = ", ".join(f"{format_ranks([rank])} {header}" for rank, header in headers.items())
        raise CollectiveMismatch(f"ranks called different things: {calls}")


def fits_inline(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is small enough to be sent with the header."""
    return int(tensor.nbytes) <= INLINE


def _fields(call: EngineCall) -> tuple[int, ...]:
    kind, how = call.kind, call.reduction or Reduction()
    tensor = next(iter(call.ins if kind in (CallKind.ALL_GATHER, CallKind.GATHER) else call.outs), None)
    if kind in (CallKind.BARRIER, CallKind.ALL_TO_ALL) or tensor is None:
        return kind, 0, 0, 0, 0, 0, 0
    parts = call.outs if kind == CallKind.ALL_GATHER else [tensor]  # ranks may contribute unequal parts there
    size, root = sum(part.numel() * part.element_size() for part in parts), call.root if kind in _ROOTED else 0
    if kind not in _REDUCING:
        return kind, 0, size, 0, 0, 0, root
    return kind, _TYPES.index(tensor.dtype), size, how.op, how.average, how.scale != 1.0, root
