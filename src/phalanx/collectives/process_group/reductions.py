"""Translates torch's reduce operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.engines.engine import Op, Reduction
from phalanx.collectives.errors import CallRefused

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PREMUL_SUM = int(dist.ReduceOp.PREMUL_SUM)

_ARITHMETIC = {
    int(dist.ReduceOp.SUM): Reduction(Op.SUM),
    int(dist.ReduceOp.AVG): Reduction(Op.SUM, average=True),
    int(dist.ReduceOp.PRODUCT): Reduction(Op.PRODUCT),
    int(dist.ReduceOp.MIN): Reduction(Op.MIN),
    int(dist.ReduceOp.MAX): Reduction(Op.MAX),
}
_BITWISE = {
    int(dist.ReduceOp.BAND): Reduction(Op.BAND),
    int(dist.ReduceOp.BOR): Reduction(Op.BOR),
    int(dist.ReduceOp.BXOR): Reduction(Op.BXOR),
}
_TRUTH = {number: one for number, one in (_ARITHMETIC | _BITWISE).items() if not one.average}

# By dtype and number of the operation, which is its hash: a single lookup, because common calls have to be fast.
KNOWN: dict[tuple[torch.dtype, int], Reduction] = {
    (dtype, number): reduction
    for dtypes, some in ((_FLOATS, _ARITHMETIC), (_INTEGERS, _ARITHMETIC | _BITWISE), ((torch.bool,), _TRUTH))
    for dtype in dtypes
    for number, reduction in some.items()
}
NAMES: dict[int, str] = {int(number): name for name, number in dist.ReduceOp.RedOpType.__members__.items()}


def name(op: Any) -> str:
    """Return the name of a reduce operation."""
    return NAMES.get(hash(op), str(op))


def find(dtype: torch.dtype, op: Any) -> Reduction:
    """Return the reduction for real numbers. Complex tensors must be viewed as pairs first."""
    known = KNOWN.get((dtype, hash(op)))
    if known is not None:
        return known
    if hash(op) == _PREMUL_SUM and dtype in (*_FLOATS, *_INTEGERS):
        return Reduction(Op.SUM, scale=_factor(op, dtype))
    raise CallRefused(
        f"{name(op)} of {str(dtype).removeprefix('torch.')}: unsupported reduction",
        "reduce another type, for example tensor.to(torch.float32)",
    )


def _factor(op: Any, dtype: torch.dtype) -> float:
    _, factor = op.__getstate__()
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise CallRefused(f"PREMUL_SUM with a factor of {factor.numel()} numbers: expected one")
        factor = factor.item()
    if dtype in _INTEGERS and factor != int(factor):
        raise CallRefused(f"PREMUL_SUM of integers ({str(dtype).removeprefix('torch.')}) with a factor of {factor:g}")
    return float(factor)
