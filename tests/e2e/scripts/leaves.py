"""leaves.py RANK: that rank exits with code 0 in the middle of the training; the others need it."""

import sys

import torch.distributed as dist

import phalanx


def train(run: phalanx.Run) -> None:
    dist.barrier()
    if run.rank == int(sys.argv[1]):
        sys.exit(0)
    dist.barrier()


phalanx.main(train)
