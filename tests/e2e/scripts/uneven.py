"""Trains until a file exists; once another file exists, rank 2 has six times more to compute."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FIXED = torch.eye(64)


class Work(torch.nn.Module):
    """Counted, not timed: the slow rank has more work, independent of other load."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.rounds = 200

    def forward(self, x):
        for _ in range(self.rounds):
            x = torch.tanh(x @ FIXED)
        return self.layer(x)


dist.init_process_group("gloo")
work = Work()
model = DistributedDataParallel(work)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ends = torch.zeros(1)
print("training", flush=True)
while not ends:
    model(torch.ones(64, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 2 and os.path.exists(f"{sys.argv[1]}/uneven"):
        work.rounds = 1200
    ends += os.path.exists(f"{sys.argv[1]}/end")
    dist.all_reduce(ends)
dist.destroy_process_group()
