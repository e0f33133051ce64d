"""Ranks for a debugger: debugged.py breakpoint|both|busy FOLDER. Rank 1 stops, the others wait for it."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

DAY = timedelta(days=1)


def limit():
    """How long the group waits."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout


def until(condition):
    while not condition():
        time.sleep(0.01)


def stop(rank):
    secret = 41 + rank
    if rank == 1:
        breakpoint()
        until(lambda: os.path.exists(flag))
        print("stepped over")
    else:
        until(lambda: limit() == DAY)
        print("patient")
        with open(flag, "w"):
            pass
    return secret


def compute(step):
    word, total = f"step {step}", 0
    for number in range(10_000):
        total += number
    return word, total


mode, folder = sys.argv[1:]
flag = f"{folder}/flag"
dist.init_process_group("gloo", timeout=timedelta(minutes=2))
rank = dist.get_rank()
if mode == "breakpoint":
    stop(rank)
    dist.barrier()
    until(lambda: limit() < DAY)
    print(f"waits {limit().total_seconds():.0f} s again")
    dist.breakpoint(1)
elif mode == "both":
    import pdb

    pdb.set_trace()
    print("continues", rank)
elif rank == 1:
    print("begun")
    dist.barrier()
else:
    print("begun")
    step = 0
    while not os.path.exists(flag):
        compute(step)
        step += 1
    dist.barrier()
dist.destroy_process_group()
