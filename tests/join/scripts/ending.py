"""Ranks that come to their end in the way that is named."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from phalanx.join.group import Group

way = sys.argv[1]
if way == "adopted":
    dist.init_process_group("gloo")
group = Group.join(timeout=float(os.environ.get("JOIN_TIMEOUT", "60")))
group.barrier()
sys.stdout.write(f"ready {group.rank} {os.getpid()}\n")
sys.stdout.flush()
if way == "exception":
    if group.rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.ones(1))
elif way == "pending":
    # An operation is under way that will never be answered, as the one who fails leaves.
    if group.rank == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("rank 1 has had enough")
    signal.pause()
elif way == "wrapped":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    kept = [model]  # nobody lets go of it before the interpreter does
elif way == "stuck":
    if group.rank == 1:
        signal.pause()
    dist.all_reduce(torch.ones(1))
elif way == "uneven":
    # Rank 0, which keeps the store, is at its end first.
    if group.rank == 1:
        time.sleep(float(os.environ.get("JOIN_LATE", "1")))
        group.store.set("late", "yes")
elif way == "twice":
    group.close()
    group = Group.join()
    assert group.sum(1) == group.world_size
elif way == "adopted":
    assert group.sum(1) == group.world_size
    group.close()
    dist.barrier()  # it is the script's, and still there
    dist.destroy_process_group()
elif way == "destroyed":
    dist.destroy_process_group()
elif way == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    assert group.sum(1) == group.world_size
sys.stdout.write(f"end {group.rank}\n")
