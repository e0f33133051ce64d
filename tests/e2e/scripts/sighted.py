"""A training that goes on for a few seconds. One rank ends itself, once; the others go on with another."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.utils.data import TensorDataset

import phalanx

STEPS, DIES_AT = int(sys.argv[1]), int(sys.argv[2])


def train(run: phalanx.Run) -> None:
    net = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    data = run.loader(TensorDataset(torch.randn(10_000, 8)), batch_size=10)
    run.keep(model=net, opt=opt, data=data)
    ddp = run.wrap(net)
    for _ in run.epochs(1):
        for (x,) in run.batches(data):
            loss = (ddp(x) - x).pow(2).mean()
            run.backward(loss)
            if run.rank == run.world_size - 1 and not run.generation and run.steps == DIES_AT:
                os.kill(os.getpid(), 9)
            time.sleep(0.02)
            run.step(opt, loss=loss, odd=float("nan"))
            if run.steps >= STEPS:
                return


phalanx.main(train)
