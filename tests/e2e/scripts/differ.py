"""Each attempt fails in another way: differ.py [KINDS [BACKENDS]], separated by commas, used in turn."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.collectives import registration


def op(x):
    if rank == 1:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)


def shape(x):
    dist.all_reduce(torch.ones(12) if rank == 2 else x)


def dtype(x):
    dist.all_reduce(x if rank else x.int())


def skipped(x):
    if rank != 1:
        dist.all_reduce(x)
    dist.barrier()


def subgroup(x):
    group = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x, group=group)
        dist.reduce(x, rank, group=group)
    dist.barrier()


def bucket(x):
    model = DistributedDataParallel(torch.nn.Linear(10, 1))
    loss = model(x).sum()
    if rank == 0:
        dist.all_reduce(loss.detach())
    loss.backward()
    dist.barrier()


def other(x):
    """Three identical failures would end the run."""
    raise ValueError("something else")


registration.register()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kinds, backends = (words.split(",") for words in [*sys.argv[1:], *("op", "gloo")[len(sys.argv) - 1 :]])
dist.init_process_group(backends[attempt % len(backends)])
rank = dist.get_rank()
for _ in range(40):  # more than are remembered
    dist.all_reduce(torch.ones(10))
kind = globals()[kinds[attempt % len(kinds)]]
print(f"this is {kind.__name__}", flush=True)
kind(torch.ones(10))
print("nobody has noticed", flush=True)
