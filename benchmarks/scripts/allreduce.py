"""Reach the first all_reduce. A plain script that any launcher can start."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(16)
dist.all_reduce(ones)
reached = time.time()
# The sum shows that every rank took part. A short append is atomic, so ranks can share the file.
with open(os.environ["BENCH_STAMPS"], "a") as file:
    file.write(f"{dist.get_rank()} {reached} {ones[0].item():.0f}\n")
dist.destroy_process_group()
