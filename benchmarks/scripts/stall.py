"""Train until rank RANK stalls while it loads data; it writes the time to FILE. stall.py RANK FILE"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def batch(step: int) -> torch.Tensor:
    """Return a batch; the chosen rank stalls at step 50."""
    if step == 50 and dist.get_rank() == int(sys.argv[1]):
        with open(f"{sys.argv[2]}.part", "w") as file:
            file.write(str(time.time()))
        os.replace(f"{sys.argv[2]}.part", sys.argv[2])
        time.sleep(3600)
    return torch.ones(8, 64)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    model(batch(step)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
