"""End after a collective, and record when. A plain script that any launcher can start."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(16)
dist.all_reduce(ones)
rank = dist.get_rank()
time.sleep(1.0)  # the start of the run must not overlap with its end
dist.barrier()
dist.destroy_process_group()
with open(os.environ["BENCH_STAMPS"], "a") as file:
    file.write(f"{rank} {time.time()} {ones[0].item():.0f}\n")
