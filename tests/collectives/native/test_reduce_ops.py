"""The reductions of the C core, compared with torch."""

from __future__ import annotations

import functools

import pytest
import torch

from phalanx.collectives import _native
from phalanx.collectives.engines.engine import Op, Reduction
from phalanx.collectives.engines.shm import DTYPES
from tests.collectives.native.calls import SUM

pytestmark = pytest.mark.xdist_group("native")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
OPS = {Op.SUM: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum}
BITS = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}


def reduced(inputs: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    out = torch.empty_like(inputs[0])
    addresses = tuple(tensor.data_ptr() for tensor in inputs)
    how = (DTYPES[out.dtype], reduction.op, reduction.scale, reduction.average)
    _native.reduce(out.data_ptr(), addresses, out.numel(), *how)
    return out


def samples(dtype: torch.dtype, count: int = 3001) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if dtype.is_floating_point:
        return [torch.randn(count, generator=generator, dtype=torch.float64).mul(50).to(dtype) for _ in range(3)]
    return [torch.randint(0, 120, (count,), generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_floats_are_reduced_in_rank_order(dtype: torch.dtype, op: Op) -> None:
    inputs = samples(dtype)
    inputs[1][5] = inputs[0][6] = inputs[2][7] = float("nan")
    wide = [tensor.float() if dtype.itemsize == 2 else tensor for tensor in inputs]
    for some in (2, 3):
        expected = functools.reduce(OPS[op], wide[:some]).to(dtype)
        torch.testing.assert_close(reduced(inputs[:some], Reduction(op)), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scaled_sums_and_averages_of_floats(dtype: torch.dtype) -> None:
    inputs = samples(dtype)
    wide = [tensor.float() if dtype.itemsize == 2 else tensor for tensor in inputs]
    average = ((wide[0] + wide[1] + wide[2]) / 3).to(dtype)
    assert torch.equal(reduced(inputs, Reduction(average=True)), average)
    factor = torch.tensor(0.3, dtype=wide[0].dtype)
    scaled = (wide[0] * factor + wide[1] * factor + wide[2] * factor).to(dtype)
    assert torch.equal(reduced(inputs, Reduction(scale=0.3)), scaled)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_reductions_of_integers(dtype: torch.dtype) -> None:
    inputs = samples(dtype)
    wide = [tensor.to(torch.int64) for tensor in inputs]
    for op, combine in {**OPS, **BITS}.items():
        assert torch.equal(reduced(inputs, Reduction(op)), functools.reduce(combine, wide).to(dtype)), op
    some = [tensor // 4 for tensor in wide]  # so that the sum does not overflow
    small = [tensor.to(dtype) for tensor in some]
    assert torch.equal(reduced(small, Reduction(average=True)), (sum(some) // 3).to(dtype))
    assert torch.equal(reduced(small, Reduction(scale=2.7)), (2 * sum(some)).to(dtype))


def test_averages_of_integers_round_towards_zero() -> None:
    inputs = [torch.tensor([-7, 7, -1], dtype=torch.int32), torch.tensor([0, 0, 0], dtype=torch.int32)]
    assert reduced(inputs, Reduction(average=True)).tolist() == [-3, 3, 0]


def test_an_average_over_more_ranks_than_the_type_can_count() -> None:
    assert reduced([torch.zeros(2, dtype=torch.uint8)] * 256, Reduction(average=True)).tolist() == [0, 0]


def test_reductions_of_booleans() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    for op in (Op.SUM, Op.MAX, Op.BOR):
        assert torch.equal(reduced([a, b], Reduction(op)), a | b)
    for op in (Op.PRODUCT, Op.MIN, Op.BAND):
        assert torch.equal(reduced([a, b], Reduction(op)), a & b)
    assert torch.equal(reduced([a, b], Reduction(Op.BXOR)), a ^ b)


def test_every_16_bit_float_survives_the_conversion() -> None:
    every = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        halves = every.view(dtype)
        same = reduced([halves, torch.zeros_like(halves)], Reduction(Op.MAX, scale=1.0))
        expected = torch.maximum(halves.float(), torch.zeros(1)).to(dtype)
        torch.testing.assert_close(same, expected, rtol=0, atol=0, equal_nan=True)


def test_denormal_halves_are_kept_when_denormals_are_flushed() -> None:
    small = torch.arange(1, 1024, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    assert torch.set_flush_denormal(True)
    try:
        doubled = reduced([small, small], SUM)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(doubled, small * 2)
