"""Helpers for the tensors of several ranks: pack, unpack, split, reduce, and reuse buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.collectives.engines.engine import Op, Reduction

LIMIT = 1 << 26  # bytes
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_COMBINE: dict[Op, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def pack(into: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the parts into one tensor, one after the other."""
    begin = 0
    for part in parts:
        into[begin : begin + part.numel()].copy_(part.view(-1))
        begin += part.numel()
    return into


def unpack(bundle: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy a packed tensor back to its parts."""
    begin = 0
    for part in parts:
        part.view(-1).copy_(bundle[begin : begin + part.numel()])
        begin += part.numel()


def split_pieces(tensor: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Split a tensor into pieces of at most `most` bytes; none if it is empty."""
    return list(tensor.split(most // tensor.element_size())) if tensor.numel() else []


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a reduction of `dtype` accumulates in."""
    return _WIDER.get(dtype, dtype)


def combine(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
    """Reduce `parts` in order into `out`, which may be one of them. Overwrites the others."""
    total = parts[0]
    for number, part in enumerate(parts[1:], 2):
        total = _COMBINE[op](total, part, out=out if number == len(parts) else total)
    return total


def finish(out: torch.Tensor, total: torch.Tensor, how: Reduction, size: int) -> None:
    """Divide by `size` if an average was requested, and write the result to `out`, rounded once."""
    if how.average:
        if total.is_floating_point():
            total.div_(size)
        else:
            total.div_(size, rounding_mode="trunc")
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)


class BufferCache:
    """Buffers that are reused, up to a limit: new pages cost more than writes to old ones."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._left = LIMIT

    def get(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of `count` elements; a later call with the same name may return the same memory."""
        size = count * dtype.itemsize
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            before = kept.numel() if kept is not None else 0
            kept = torch.empty(size, dtype=torch.uint8)
            if size - before <= self._left:
                self._left -= size - before
                self._kept[name] = kept
        return kept[:size].view(dtype)

    def bytes(self, name: str, count: int) -> torch.Tensor:
        """Return a buffer of bytes."""
        return self.get(name, count, torch.uint8)

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a buffer of the size and type of `tensor`."""
        return self.get(name, tensor.numel(), tensor.dtype)

    def copy(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of `tensor`, converted to `dtype`, in a buffer."""
        return self.get(name, tensor.numel(), dtype).copy_(tensor)
