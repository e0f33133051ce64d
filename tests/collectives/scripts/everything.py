"""Uses all of torch.distributed with the given backend. Every rank checks its results and prints a line.

python everything.py shm 1      # and then rank 1 dies
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.collectives import registration

registration.register()
torch.set_num_threads(1)
backend = sys.argv[1]
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
everyone = range(size)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if got.dtype != want.dtype or not torch.equal(got, want):
        raise AssertionError(f"rank {rank}: {what}: {got} instead of {want}")


def values(of: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers: their sums are exact in every type and order."""
    return ((torch.arange(count) * 3 + of * 5) % 4 + 1).to(dtype)


def reductions(count: int, *dtypes: torch.dtype) -> None:
    for dtype in dtypes:
        parts = torch.stack([values(of, count, dtype) for of in everyone])
        wide = parts.double() if dtype in FLOATS else parts.long()
        wants = {"SUM": wide.sum(0), "PRODUCT": wide.prod(0), "MIN": wide.amin(0), "MAX": wide.amax(0)}
        wants["AVG"] = wide.sum(0) / size if dtype in FLOATS else wide.sum(0) // size
        if dtype in INTEGERS:
            wants["BAND"], wants["BOR"], wants["BXOR"] = parts[0], parts[0], parts[0]
            for part in parts[1:]:
                wants["BAND"], wants["BOR"], wants["BXOR"] = (
                    wants["BAND"] & part,
                    wants["BOR"] | part,
                    wants["BXOR"] ^ part,
                )
        for name, want in wants.items():
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            if name == "AVG" and dtype in FLOATS:
                expected = wide.sum(0).to(torch.float32 if dtype.itemsize < 8 else dtype) / size
            else:
                expected = want
            same(f"all_reduce {name} {dtype}", tensor, expected.to(dtype))
            tensor = parts[rank].clone()
            dist.reduce(tensor, size - 1, getattr(dist.ReduceOp, name))
            same(f"reduce {name} {dtype}", tensor, expected.to(dtype) if rank == size - 1 else parts[rank])
    tensor = torch.full((count,), float(rank + 1))
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    same("PREMUL_SUM", tensor, torch.full((count,), size * (size + 1) / 4))
    tensor = torch.tensor([rank == 0, True, False])
    dist.all_reduce(tensor, dist.ReduceOp.BAND)
    same("bool", tensor, torch.tensor([size == 1, True, False]))
    tensor = torch.full((count,), complex(rank, 1))
    dist.all_reduce(tensor)
    same("complex", tensor, torch.full((count,), complex(sum(everyone), size)))


def moves(count: int, *dtypes: torch.dtype) -> None:
    for dtype in dtypes:
        mine, alls = values(rank, count, dtype), [values(of, count, dtype) for of in everyone]
        for root in everyone:
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            same("broadcast", tensor, alls[root])
            outs = [torch.empty_like(mine) for _ in everyone]
            dist.gather(mine, outs if rank == root else None, dst=root)
            if rank == root:
                same("gather", torch.stack(outs), torch.stack(alls))
            tensor = torch.empty_like(mine)
            dist.scatter(tensor, alls if rank == root else None, src=root)
            same("scatter", tensor, mine)
        dist.all_gather(outs, mine)
        same("all_gather", torch.stack(outs), torch.stack(alls))
        whole = torch.empty(size * count, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        same("all_gather_into_tensor", whole, torch.cat(alls))
        dist.all_to_all(outs, [values(rank * size + to, count, dtype) for to in everyone])
        same("all_to_all", torch.stack(outs), torch.stack([values(of * size + rank, count, dtype) for of in everyone]))
    there = torch.full((sum(range(1, size + 1)),), rank)  # one for rank 0, two for rank 1, …
    here = torch.empty(size * (rank + 1), dtype=torch.int64)
    dist.all_to_all_single(here, there, [rank + 1] * size, [*range(1, size + 1)])
    same("all_to_all_single", here, torch.arange(size).repeat_interleave(rank + 1))
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.cat([values(to, count, dtype) for to in everyone])
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, whole)
        same("reduce_scatter_tensor", out, values(rank, count, dtype) * size)
        dist.reduce_scatter(out, [*whole.chunk(size)])
        same("reduce_scatter", out, values(rank, count, dtype) * size)


def messages() -> None:
    to, of = (rank + 1) % size, (rank - 1) % size
    for count in (1, 300_000):
        here = [torch.empty(count) for _ in range(2)]
        works = [dist.irecv(here[tag], of, tag=tag) for tag in (1, 0)]
        works += [dist.isend(torch.full((count,), float(rank * 10 + tag)), to, tag=tag) for tag in (0, 1)]
        for work in works:
            work.wait()
        for tag in (0, 1):
            same(f"tag {tag}", here[tag], torch.full((count,), float(of * 10 + tag)))
    here[0] = torch.empty(5)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((5,), float(rank)), to), dist.P2POp(dist.irecv, here[0], of)]
    ):
        work.wait()
    same("batched", here[0], torch.full((5,), float(of)))
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=7)
        return
    come = []
    for _ in range(size - 1):
        one = torch.empty(1, dtype=torch.int64)
        come.append(dist.recv(one, tag=7))
        assert come[-1] == one.item()
    assert sorted(come) == [*range(1, size)], come


def the_rest() -> None:
    works = [(dist.all_reduce(part := torch.full((1000,), float(rank + k)), async_op=True), part) for k in range(4)]
    for k, (work, part) in enumerate(works):
        work.wait()
        same("async", part, torch.full((1000,), float(sum(everyone) + size * k)))
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": of} for of in everyone]
    tensor = values(rank, 6, torch.float32).view(2, 3).t()
    dist.all_reduce(tensor)
    same("not contiguous", tensor, sum(values(of, 6, torch.float32).view(2, 3).t() for of in everyone))
    for ranks in ([0, size - 1], [size - 1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            same("subgroup", tensor, torch.tensor([float(sum(ranks))]))
            tensor = torch.tensor([rank])
            dist.broadcast(tensor, size - 1, group=group)
            same("broadcast in a subgroup", tensor, torch.tensor([size - 1]))
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    )
    rows = torch.randn(size, 4, 16)
    model(rows[rank]).mean().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    alone = model.module
    alone.zero_grad()
    alone(rows).mean().backward()
    for mine, whole in zip(ours, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, whole.grad)


reductions(0, torch.float32)
reductions(3, *INTEGERS, *FLOATS)
reductions(20_000, torch.bfloat16)
moves(0, torch.int64)
moves(3, torch.bfloat16, torch.complex128, torch.bool)
moves(20_000, torch.float32)
messages()
the_rest()
dist.barrier()
print(f"rank {rank} of {size}: all as it should be, by {dist.get_backend()}", flush=True)
if len(sys.argv) > 2:
    last = dist.new_group(timeout=timedelta(seconds=120 if sys.argv[3] == "dies" else 2))
    if sys.argv[3] == "dies":  # after all ranks have the group; the store of MPI's groups has no values
        store = dist.distributed_c10d._get_default_store()
        store.set(f"has made the last group: {rank}", "")
        store.wait([f"has made the last group: {other}" for other in range(size)])
    if rank == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "dies" else time.sleep(600)
    for _ in range(2):
        begun = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1_000_000), group=last)
        except dist.DistBackendError as error:
            print(f"rank {rank} after {time.monotonic() - begun:.1f} s: {type(error).__name__}: {error}", flush=True)
dist.destroy_process_group()
