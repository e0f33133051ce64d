"""Tensors of several ranks: packed together, taken apart, cut into pieces, reduced one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .engine import Op, Reduction

ROOM = 1 << 26  # bytes
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
    begin = 0
    for part in parts:
        into[begin : begin + part.numel()].copy_(part.view(-1))
        begin += part.numel()
    return into


def unpack(bundle: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    begin = 0
    for part in parts:
        part.view(-1).copy_(bundle[begin : begin + part.numel()])
        begin += part.numel()


def pieces_of(tensor: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Of at most so many bytes; of nothing, none."""
    return list(tensor.split(most // tensor.element_size())) if tensor.numel() else []


def wider(dtype: torch.dtype) -> torch.dtype:
    """In which it is reduced."""
    return _WIDER.get(dtype, dtype)


def combine(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
    """In their order; `out` may be one of them. The others are written to, too."""
    total = parts[0]
    for number, part in enumerate(parts[1:], 2):
        total = _COMBINE[op](total, part, out=out if number == len(parts) else total)
    return total


def finish(out: torch.Tensor, total: torch.Tensor, how: Reduction, size: int) -> None:
    """Averaged where that is asked for, and rounded once."""
    if how.average:
        if total.is_floating_point():
            total.div_(size)
        else:
            total.div_(size, rounding_mode="trunc")
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)


class Room:
    """Memory that is used again, up to a limit: new pages cost more than what is written to them."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._left = ROOM

    def get(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
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
        return self.get(name, count, torch.uint8)

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.get(name, tensor.numel(), tensor.dtype)

    def copy(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.get(name, tensor.numel(), dtype).copy_(tensor)
