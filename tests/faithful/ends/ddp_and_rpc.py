import os

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
model(torch.randn(8, 16)).sum().backward()
print(rpc.rpc_sync(f"worker{(rank + 1) % size}", max, args=(3, 4)))
dist.destroy_process_group()
rpc.shutdown()
