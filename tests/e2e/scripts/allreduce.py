"""allreduce.py [ROUNDS]: every rank adds its number; prints "rank R of W: SUM"."""

import sys

import torch
import torch.distributed as dist

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
dist.init_process_group("gloo")
for _ in range(rounds):
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {number.item():g}\n", end="", flush=True)
dist.destroy_process_group()
