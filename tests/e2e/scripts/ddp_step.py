"""ddp_step.py [STEPS]: DDP and AdamW on gloo; every rank prints the same loss and the same weights."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1
dist.init_process_group("gloo")
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.randn(2 * dist.get_world_size(), 4)[dist.get_rank() :: dist.get_world_size()]
for _ in range(steps):
    optimizer.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss := loss.detach())
weights = sum(parameter.detach().sum().item() for parameter in model.parameters())
print(f"rank {dist.get_rank()} loss {loss.item():.6f} weights {weights:.6f}\n", end="", flush=True)
dist.destroy_process_group()
