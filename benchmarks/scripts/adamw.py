"""Reach the first AdamW step of a DDP model. A plain script that any launcher can start."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 1, bias=False))
optimizer = torch.optim.AdamW(model.parameters())
# Inputs are rank + 1, so the gradient that DDP averages shows how many ranks took part.
model(torch.full((1, 64), dist.get_rank() + 1.0)).sum().backward()
optimizer.step()
reached = time.time()
world = 2 * next(model.parameters()).grad[0, 0].item() - 1
with open(os.environ["BENCH_STAMPS"], "a") as file:
    file.write(f"{dist.get_rank()} {reached} {world:.0f}\n")
# Delete the wrapper before the group: torch may abort or hang when the wrapper holds the last reference to it.
del model, optimizer
dist.destroy_process_group()
