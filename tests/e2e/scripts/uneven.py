"""Trains; rank 2 has so many times more to compute. `uneven.py FACTOR [STEPS]`"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Work(torch.nn.Module):
    """Counted, not timed: the slow one has more of it, whatever else the machine does."""

    def __init__(self, rounds):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.rounds = rounds

    def forward(self, x):
        for _ in range(self.rounds):
            x = torch.tanh(x @ FIXED)
        return self.layer(x)


FIXED = torch.eye(64)
dist.init_process_group("gloo")
factor, steps = int(sys.argv[1]), int(sys.argv[2])
rounds = 400 * (factor if dist.get_rank() == 2 else 1)
model = DistributedDataParallel(Work(rounds))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(steps):
    model(torch.ones(64, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {os.environ['RANK']} is done", flush=True)
dist.barrier()
dist.destroy_process_group()
