"""Random plans of calls on a phalanx group and on gloo, in the same processes.

    python -m tests.collectives.plans --ranks 2 3 4 --engines shared plain --batches 12 --seed 1

Every rank draws the same plan, and knows the input of the others. Moved data must equal the expectation and gloo's
result. Reduced data must equal the expectation to the last bit, and be close to gloo's result.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.engines.engine import Op, Reduction, as_bytes
from phalanx.collectives.engines.gloo import reduced
from tests.collectives.ranks import fork

_FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
_WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
_MOVED = [*_FLOATS, *_WHOLE, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn]
_OPS = {
    dist.ReduceOp.SUM: Reduction(Op.SUM),
    dist.ReduceOp.PRODUCT: Reduction(Op.PRODUCT),
    dist.ReduceOp.MIN: Reduction(Op.MIN),
    dist.ReduceOp.MAX: Reduction(Op.MAX),
    dist.ReduceOp.AVG: Reduction(Op.SUM, average=True),
}
_BITS = {
    dist.ReduceOp.BAND: Reduction(Op.BAND),
    dist.ReduceOp.BOR: Reduction(Op.BOR),
    dist.ReduceOp.BXOR: Reduction(Op.BXOR),
}
_REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "all_reduce_coalesced"]
_MOVING = ["broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single"]
_OTHER = ["ring", "batch", "objects", "barrier"]
_LAYOUTS = ["plain", "strided", "turned"]


@dataclass(frozen=True)
class Step:
    number: int
    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: Any
    root: int
    layout: str
    later: bool
    sizes: tuple[tuple[int, ...], ...]  # rows that each rank sends to each rank
    members: tuple[int, ...]


def draw(dice: random.Random, number: int, groups: list[tuple[int, ...]]) -> Step:
    members = dice.choice(groups)
    what = dice.choice(_REDUCING * 3 + _MOVING * 2 + _OTHER)
    dtype, op = dice.choice(_MOVED), None
    if what in _REDUCING:
        dtype = dice.choice(_FLOATS + _WHOLE)
        op = dice.choice([*_OPS, *(_BITS if dtype in _WHOLE else ())])
    shape = dice.choice([(), (1,), (7,), (0,), (3, 5), (2, 0, 3), (4, 1, 6), (1031,), (257, 300)])
    if what not in ("all_reduce", "broadcast", "reduce", "all_reduce_coalesced") and not shape:
        shape = (1,)
    sizes = tuple(tuple(dice.randrange(4) for _ in members) for _ in members)
    return Step(
        number, what, dtype, shape, op, dice.randrange(len(members)), dice.choice(_LAYOUTS), dice.random() < 0.5,
        sizes, members,
    )  # fmt: skip


def tensor(step: Step, rank: int, part: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the input of a rank. Every rank can compute it."""
    maker = torch.Generator().manual_seed(step.number * 10007 + rank * 101 + part)
    if step.dtype.is_floating_point:
        return (torch.randn(shape, generator=maker) * 3).to(step.dtype)
    if step.dtype.is_complex:
        return torch.randn(shape, generator=maker, dtype=step.dtype)
    if step.dtype == torch.bool:
        return torch.rand(shape, generator=maker) < 0.5
    return torch.randint(0, 120, shape, generator=maker).to(step.dtype)


def laid(step: Step, value: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory that may not be contiguous."""
    if step.layout == "strided" and value.dim():
        wide = torch.zeros((*value.shape[:-1], value.shape[-1] * 2), dtype=value.dtype)[..., ::2]
        wide.copy_(value)
        return wide
    if step.layout == "turned" and value.dim() > 1:
        turned = torch.zeros(value.shape[::-1], dtype=value.dtype).permute(*range(value.dim() - 1, -1, -1))
        turned.copy_(value)
        return turned
    return value.clone()


class Run:
    """One step on one group: starts it, finishes it, and has its result."""

    def __init__(self, step: Step, rank: int, group: Any, later: bool) -> None:
        self.step, self.rank, self.group, self.later = step, rank, group, later
        self.size = len(step.members)
        self.outs: list[torch.Tensor] = []
        self.works: list[Any] = []
        self.gathered: Any = None
        getattr(self, step.what)()

    def mine(self, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return laid(self.step, tensor(self.step, self.rank, part, self.step.shape if shape is None else shape))

    def room(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        out = laid(self.step, torch.zeros(self.step.shape if shape is None else shape, dtype=self.step.dtype))
        self.outs.append(out)
        return out

    def begun(self, work: Any) -> None:
        if self.later:
            self.works.append(work)

    def finish(self) -> None:
        for work in self.works:
            work.wait()

    def _long(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * self.size, *shape[1:])

    def all_reduce(self) -> None:
        self.outs = [self.mine()]
        self.begun(dist.all_reduce(self.outs[0], self.step.op, self.group, self.later))

    def all_reduce_coalesced(self) -> None:
        self.outs = [self.mine(part) for part in range(3)]
        with dist._coalescing_manager(self.group, async_ops=self.later) as works:
            for out in self.outs:
                dist.all_reduce(out, self.step.op, self.group)
        self.begun(works)

    def reduce(self) -> None:
        out = self.mine()
        self.begun(dist.reduce(out, op=self.step.op, group=self.group, async_op=self.later, group_dst=self.step.root))
        self.outs = [out] if self.rank == self.step.root else []

    def reduce_scatter(self) -> None:
        ins = [self.mine(part) for part in range(self.size)]
        self.begun(dist.reduce_scatter(self.room(), ins, self.step.op, self.group, self.later))

    def reduce_scatter_single(self) -> None:
        whole = self.mine(shape=self._long(self.step.shape))
        self.begun(dist.reduce_scatter_single(self.room(), whole, self.step.op, self.group, self.later))

    def broadcast(self) -> None:
        self.outs = [self.mine()]
        self.begun(dist.broadcast(self.outs[0], group=self.group, async_op=self.later, group_src=self.step.root))

    def all_gather(self) -> None:
        outs = [self.room() for _ in range(self.size)]
        self.begun(dist.all_gather(outs, self.mine(), self.group, self.later))

    def all_gather_single(self) -> None:
        self.begun(dist.all_gather_single(self.room(self._long(self.step.shape)), self.mine(), self.group, self.later))

    def gather(self) -> None:
        outs = [self.room() for _ in range(self.size)] if self.rank == self.step.root else None
        self.begun(dist.gather(self.mine(), outs, group=self.group, async_op=self.later, group_dst=self.step.root))

    def scatter(self) -> None:
        ins = [self.mine(part) for part in range(self.size)] if self.rank == self.step.root else None
        self.begun(dist.scatter(self.room(), ins, group=self.group, async_op=self.later, group_src=self.step.root))

    def all_to_all(self) -> None:
        ins = [self.mine(part, (rows, 3)) for part, rows in enumerate(self.step.sizes[self.rank])]
        outs = [self.room((rows[self.rank], 3)) for rows in self.step.sizes]
        self.begun(dist.all_to_all(outs, ins, self.group, self.later))

    def all_to_all_single(self) -> None:
        there, here = self.step.sizes[self.rank], [rows[self.rank] for rows in self.step.sizes]
        whole = self.mine(shape=(sum(there), 2))
        self.begun(
            dist.all_to_all_single(
                self.room((sum(here), 2)), whole, here, list(there), group=self.group, async_op=self.later
            )
        )

    def ring(self) -> None:
        there, here = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sent = [dist.isend(self.mine(part), group=self.group, tag=part, group_dst=there) for part in range(2)]
        for part in (1, 0):  # matched by tag, not by order
            self.works.append(dist.irecv(self.room(), group=self.group, tag=part, group_src=here))
        self.works += sent

    def batch(self) -> None:
        there, here = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ops = [
            dist.P2POp(dist.isend, self.mine(), group=self.group, group_peer=there),
            dist.P2POp(dist.irecv, self.room(), group=self.group, group_peer=here),
        ]
        self.works += dist.batch_isend_irecv(ops)

    def objects(self) -> None:
        self.gathered = [None] * self.size
        dist.all_gather_object(self.gathered, {"rank": self.rank, "step": self.step.number}, self.group)

    def barrier(self) -> None:
        self.begun(dist.barrier(self.group, self.later))


def expected(step: Step, rank: int) -> list[torch.Tensor]:
    ranks, root, shape = range(len(step.members)), step.root, step.shape
    how = {**_OPS, **_BITS}.get(step.op, Reduction())

    def over(part: int) -> torch.Tensor:
        return reduced([tensor(step, other, part, shape) for other in ranks], how)

    match step.what:
        case "all_reduce":
            return [over(0)]
        case "all_reduce_coalesced":
            return [over(part) for part in range(3)]
        case "reduce":
            return [over(0)] if rank == root else []
        case "reduce_scatter":
            return [over(rank)]
        case "reduce_scatter_single":
            wholes = [tensor(step, other, 0, (shape[0] * len(ranks), *shape[1:])) for other in ranks]
            return [reduced([whole[rank * shape[0] : (rank + 1) * shape[0]] for whole in wholes], how)]
        case "broadcast":
            return [tensor(step, root, 0, shape)]
        case "all_gather":
            return [tensor(step, other, 0, shape) for other in ranks]
        case "all_gather_single":
            return [torch.cat([tensor(step, other, 0, shape) for other in ranks])]
        case "gather":
            return [tensor(step, other, 0, shape) for other in ranks] if rank == root else []
        case "scatter":
            return [tensor(step, root, rank, shape)]
        case "all_to_all":
            return [tensor(step, other, rank, (step.sizes[other][rank], 3)) for other in ranks]
        case "all_to_all_single":
            wholes = [tensor(step, other, 0, (sum(step.sizes[other]), 2)) for other in ranks]
            return [torch.cat([whole.split(step.sizes[other])[rank] for other, whole in enumerate(wholes)])]
        case "ring":
            return [tensor(step, (rank - 1) % len(ranks), part, shape) for part in (1, 0)]
        case "batch":
            return [tensor(step, (rank - 1) % len(ranks), 0, shape)]
        case _:
            return []


def gloo_can(step: Step) -> bool:
    # gloo's all_to_all needs equal sizes
    if step.dtype in (torch.int16, torch.float8_e4m3fn) or step.what == "all_to_all":
        return False
    if step.op == dist.ReduceOp.AVG and step.dtype in _WHOLE:
        return False
    return not (step.what == "gather" and step.dtype.is_complex)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return as_bytes(value.contiguous())


def near(step: Step, one: torch.Tensor, other: torch.Tensor) -> bool:
    coarse = step.dtype in (torch.float16, torch.bfloat16)
    return torch.allclose(one.double(), other.double(), rtol=0.1 if coarse else 1e-4, atol=0.5 if coarse else 1e-4)


def check(step: Step, ours: Run, gloo: Run | None) -> None:
    for out, value in zip(ours.outs, expected(step, ours.rank), strict=True):
        assert same(out, value), f"{step}: {out} is not {value}"
    if step.what == "objects":
        assert ours.gathered == [{"rank": other, "step": step.number} for other in range(ours.size)]
    for out, value in zip(ours.outs, gloo.outs if gloo else ours.outs, strict=True):
        assert near(step, out, value) if step.op else same(out, value), f"{step}: {out}, gloo {value}"


def run_plans(rank: int, ranks: int, store: str) -> None:
    given = _given()
    dice = random.Random(given.seed * 7919 + ranks)
    dist.init_process_group(
        "gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks), timeout=timedelta(seconds=60)
    )
    groups = [tuple(range(ranks)), *([(0, ranks - 1)] if ranks > 2 else []), *([(2, 1, 3)] if ranks > 3 else [])]
    ours = {members: dist.new_group(members, backend="shm", sort_ranks=False) for members in groups}
    theirs = {members: dist.new_group(members, backend="gloo", sort_ranks=False) for members in groups}
    done = 0
    for batch in range(given.batches):
        steps = [draw(dice, batch * 100 + at, groups) for at in range(8)]
        begun = []
        for step in steps:
            if rank in step.members:
                own = step.members.index(rank)
                begun.append(Run(step, own, ours[step.members], step.later))
        random.Random(rank + batch).shuffle(begun)  # wait in any order
        for run in begun:
            run.finish()
        for run in sorted(begun, key=lambda one: one.step.number):
            check(run.step, run, _on_gloo(run.step, run.rank, theirs[run.step.members]))
            done += 1
    engine = type(ours[groups[0]]._engine).__name__.removesuffix("Engine").lower()
    if rank == 0:
        print(f"{engine}, {ranks} ranks: {done} calls as on gloo")
    dist.destroy_process_group()


def _on_gloo(step: Step, rank: int, group: Any) -> Run | None:
    """Run a step on gloo with contiguous memory: with other memory, some results of gloo are wrong."""
    if not gloo_can(step):
        return None
    run = Run(replace(step, layout="plain"), rank, group, False)
    run.finish()
    return run


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--engines", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    from phalanx.collectives.registration import register

    register()
    given = _given()
    wrong = 0
    for engine in given.engines:
        for ranks in given.ranks:
            wrong += any(fork(ranks, run_plans if engine == "shm" else _without_native))
    return wrong


def _without_native(rank: int, ranks: int, store: str) -> None:
    sys.modules["phalanx.collectives._native"] = None  # type: ignore[assignment]
    run_plans(rank, ranks, store)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
