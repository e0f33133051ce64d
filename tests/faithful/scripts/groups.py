"""Several groups: of all ranks, of each rank alone, a mesh, point-to-point, every reduction."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("data", "model"))
print(mesh["data"].get_local_rank(), mesh["model"].size(), mesh)
everybody, alone = dist.new_group(), [dist.new_group([one]) for one in range(size)]
for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
    values = torch.arange(3.0) + rank + 0.1
    dist.all_reduce(values, op, group=everybody)
    print(op, values.tolist())
dist.broadcast(values, rank, group=alone[rank])
gathered = [torch.zeros(2) for _ in range(size)]
dist.all_gather(gathered, torch.tensor([rank, rank * 0.5]))
print(gathered)
scattered = torch.zeros(2)
dist.scatter(scattered, [torch.full((2,), float(n)) for n in range(size)] if rank == 0 else None)
work = dist.isend(scattered, (rank + 1) % size)
received = torch.zeros(2)
dist.recv(received, (rank - 1) % size)
work.wait()
print(scattered.tolist(), received.tolist())
shards = torch.zeros(2)
dist.reduce_scatter_tensor(shards, torch.arange(2.0 * size) + rank)
print(shards.tolist(), dist.get_process_group_ranks(alone[rank]), dist.get_backend())
dist.destroy_process_group()
