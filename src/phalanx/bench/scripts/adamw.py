"""Measured: the way to the first step of AdamW on a DDP model. A plain script, as any launcher would get it."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 1, bias=False))
optimizer = torch.optim.AdamW(model.parameters())
# The loss is rank + 1, summed over the weights' inputs: its gradient, averaged by DDP, tells how many took part.
model(torch.full((1, 64), dist.get_rank() + 1.0)).sum().backward()
optimizer.step()
reached = time.time()
seen = 2 * next(model.parameters()).grad[0, 0].item() - 1
with open(os.environ["BENCH_STAMPS"], "a") as file:
    file.write(f"{dist.get_rank()} {reached} {seen:.0f}\n")
# The wrapper goes before the group: torch may abort or wait for ever when it is the last to hold the group.
del model, optimizer
dist.destroy_process_group()
