"""phalanx run -g 4 examples/collectives.py: every collective of torch.distributed, its result checked on each rank"""

import datetime

import torch
import torch.distributed as dist

# Their names since torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ranks = torch.arange(world, dtype=torch.float32)
total = ranks.sum().item()
right: list[str] = []


def check(name: str, seen: object, expected: object) -> None:
    seen, expected = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (seen, expected))
    assert seen == expected, f"{name} on rank {rank}: {seen}, expected {expected}"
    right.append(name)


def mine() -> torch.Tensor:
    """One number of each rank's own: its rank."""
    return torch.tensor([float(rank)])


def row() -> torch.Tensor:
    """One number for each rank: rank 2 of 4 has 20, 21, 22, 23."""
    return 10.0 * rank + ranks


# One to all.
x = mine()
dist.broadcast(x, src=1)
check("broadcast", x, torch.tensor([1.0]))

x = torch.empty(1)
dist.scatter(x, list(row().split(1)) if rank == 0 else None, src=0)
check("scatter", x, mine())

# All to one.
x = mine()
dist.reduce(x, dst=0)
check("reduce", x if rank == 0 else mine(), torch.tensor([total]) if rank == 0 else mine())

parts = [torch.empty(1) for _ in range(world)] if rank == 0 else None
dist.gather(mine(), parts, dst=0)
check("gather", torch.cat(parts) if parts else ranks, ranks)

# All to all.
for name, op, expected in (
    ("sum", dist.ReduceOp.SUM, total + world),
    ("product", dist.ReduceOp.PRODUCT, (ranks + 1).prod().item()),
    ("min", dist.ReduceOp.MIN, 1.0),
    ("max", dist.ReduceOp.MAX, float(world)),
):
    x = mine() + 1
    dist.all_reduce(x, op)
    check(f"all_reduce({name})", x, torch.tensor([expected]))

x = mine()
work = dist.all_reduce(x, async_op=True)  # runs while this rank does something else
work.wait()
check("all_reduce(async)", x, torch.tensor([total]))

parts = [torch.empty(1) for _ in range(world)]
dist.all_gather(parts, mine())
check("all_gather", torch.cat(parts), ranks)

x = torch.empty(world)
all_gather_single(x, mine())  # into one tensor
check("all_gather_single", x, ranks)

x = torch.empty(1)
dist.reduce_scatter(x, list(row().split(1)))
check("reduce_scatter", x, torch.tensor([10 * total + world * rank]))

x = torch.empty(1)
reduce_scatter_single(x, row())
check("reduce_scatter_single", x, torch.tensor([10 * total + world * rank]))

column = 10.0 * ranks + rank  # what every rank has for this one
parts = [torch.empty(1) for _ in range(world)]
dist.all_to_all(parts, list(row().split(1)))
check("all_to_all", torch.cat(parts), column)

x = torch.empty(world)
dist.all_to_all_single(x, row())
check("all_to_all_single", x, column)

# Uneven: rank r sends r + 1 numbers to each.
sent = mine().repeat((rank + 1) * world)
counts = [r + 1 for r in range(world)]
x = torch.empty(sum(counts))
dist.all_to_all_single(x, sent, output_split_sizes=counts, input_split_sizes=[rank + 1] * world)
check("all_to_all_single(uneven)", x, ranks.repeat_interleave(torch.tensor(counts)))

# Python objects. They are pickled, and unpickling can run code of the sender: only for ranks that trust each other.
of_all = [{"from": r} for r in range(world)]
things = [{"from": rank}]
dist.broadcast_object_list(things, src=1)
check("broadcast_object_list", things, [{"from": 1}])

things = [None]
dist.scatter_object_list(things, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
check("scatter_object_list", things, [f"for {rank}"])

things = [None] * world
dist.gather_object({"from": rank}, things if rank == 0 else None, dst=0)
check("gather_object", things, of_all if rank == 0 else [None] * world)

dist.all_gather_object(things, {"from": rank})
check("all_gather_object", things, of_all)

# No rank continues before all are here.
dist.barrier()
dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))  # says which rank did not come
right += ["barrier", "monitored_barrier"]

print(f"rank {rank} of {world}: {len(right)} collectives are right: {', '.join(right)}")
dist.destroy_process_group()
