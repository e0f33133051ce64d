"""DTensor and tensor parallelism on a mesh."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
output = model(torch.randn(3, 4))
output.sum().backward()
print(output.tolist(), model[0].weight.grad.to_local().sum().item())
sharded = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
print(sharded.to_local().tolist(), (sharded * 2).sum().full_tensor().item())
dist.destroy_process_group()
