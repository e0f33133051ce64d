"""seen.py FOLDER: a training that files in FOLDER control: die (the last rank, once), stuck (rank 1, for as long as the
file exists), end."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.utils.data import TensorDataset

import phalanx

DIE, STUCK, END = (os.path.join(sys.argv[1], name) for name in ("die", "stuck", "end"))


def wait_for_data() -> None:
    while os.path.exists(STUCK):
        time.sleep(0.05)


def train(run: phalanx.Run) -> None:
    net = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    data = run.loader(TensorDataset(torch.randn(1_000_000, 1)), batch_size=10)
    run.keep(model=net, opt=opt, data=data)
    ddp = run.wrap(net)
    for _ in run.epochs(1):
        for (x,) in run.batches(data):
            if run.rank == 1:
                wait_for_data()
            loss = (ddp(x) - x).pow(2).mean()
            run.backward(loss)
            if run.rank == run.world_size - 1 and not run.group.generation and os.path.exists(DIE):
                os.kill(os.getpid(), 9)
            time.sleep(0.02)
            run.step(opt, loss=loss)
            if run.steps % 50 == 0:
                run.print(f"step {run.steps} is made")
            if run.group.broadcast(os.path.exists(END)):
                return


phalanx.main(train)
