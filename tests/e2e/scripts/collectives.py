"""Runs every collective of torch; the results are written to a folder."""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

found = {}


def keep(name, *tensors):
    text = repr([[tensor.dtype, tensor.tolist()] for tensor in tensors])
    found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]


def everything(name, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_global_rank(group, size - 1)

    def mine(*shape, dtype=torch.float32):
        return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype) * (rank + 1)

    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        value = mine(3, 2)
        dist.all_reduce(value, operation, group=group)
        keep(f"{name} all_reduce {operation}", value)
    value = mine(6) if rank else mine(2, 3)  # different layout, same number of elements
    dist.all_reduce(value, group=group)
    keep(f"{name} all_reduce laid out", value.flatten())
    value = mine(4, dtype=torch.int64)
    dist.broadcast(value, root, group=group)
    keep(f"{name} broadcast", value)
    value = mine(4)
    dist.reduce(value, root, group=group)
    keep(f"{name} reduce", value if rank == size - 1 else torch.zeros(1))
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, mine(2), group=group)
    keep(f"{name} all_gather", *parts)
    whole = torch.zeros(2 * size)
    dist.all_gather_into_tensor(whole, mine(2), group=group)
    keep(f"{name} all_gather_into_tensor", whole)
    dist.gather(mine(2), parts if rank == size - 1 else None, root, group=group)
    keep(f"{name} gather", *parts)
    part = torch.zeros(2)
    dist.scatter(part, [mine(2) + at for at in range(size)] if rank == size - 1 else None, root, group=group)
    keep(f"{name} scatter", part)
    dist.reduce_scatter_tensor(part, mine(2 * size), group=group)
    keep(f"{name} reduce_scatter_tensor", part)
    dist.reduce_scatter(part, [mine(2) + at for at in range(size)], group=group)
    keep(f"{name} reduce_scatter", part)
    dist.all_to_all_single(whole, mine(2 * size), group=group)
    keep(f"{name} all_to_all_single", whole)
    # Uneven: each rank sends as many elements as the position of the other.
    taken = torch.zeros((rank + 1) * size)
    sent = list(range(1, size + 1))
    dist.all_to_all_single(taken, mine(sum(sent)), [rank + 1] * size, sent, group=group)
    keep(f"{name} uneven all_to_all_single", taken)
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "long": "x" * rank * 100}, group=group)
    dist.broadcast_object_list(objects, root, group=group)
    found[f"{name} objects"] = json.dumps(objects)
    values = [mine(5) + at for at in range(10)]
    works = [dist.all_reduce(value, group=group, async_op=True) for value in values]
    for work in works:
        work.wait()
    keep(f"{name} async", *values)
    with torch.inference_mode():
        value = mine(3) if rank else torch.ones(3)
        dist.all_reduce(value, group=group)
        keep(f"{name} inference", value.clone())
    keep(f"{name} functional", functional.all_reduce(mine(3), "sum", group) + 0)


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(3))), bucket_cap_mb=0.01
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.full((2, 40), dist.get_rank() + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    keep("ddp", *[parameter.detach() for parameter in model.parameters()])


for again in range(2):  # a group that is left, and another with the same names
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(again), store), rank=rank, world_size=size)
    everything(f"{again} world", dist.group.WORLD)
    pair, rest = dist.new_group([0, size - 1]), dist.new_group(list(range(1, size)))
    if rank in (0, size - 1) and not again:
        everything("pair", pair)
    if rank and not again:
        everything("rest", rest)
    if rank == size - 1:  # two groups in another order, which is no error
        first, second = torch.ones(1), torch.ones(1)
        works = [dist.all_reduce(second, group=rest, async_op=True), dist.all_reduce(first, group=pair, async_op=True)]
    elif rank == 0:
        works = [dist.all_reduce(torch.ones(1), group=pair, async_op=True)]
    else:
        works = [dist.all_reduce(torch.ones(1), group=rest, async_op=True)]
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(torch.ones(1), 0)
    for work in works:
        work.wait()
    train()
    dist.barrier()
    dist.destroy_process_group()

with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(found, file)
