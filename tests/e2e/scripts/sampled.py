"""A training that runs until a file exists. The last rank then ends itself; the others continue with a new one."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.utils.data import TensorDataset

import phalanx

END, DIE = (os.path.join(sys.argv[1], name) for name in ("end", "die"))


def train(run: phalanx.Run) -> None:
    net = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    data = run.loader(TensorDataset(torch.randn(1_000_000, 1)), batch_size=10)
    run.keep(model=net, opt=opt, data=data)
    ddp = run.wrap(net)
    for _ in run.epochs(1):
        for (x,) in run.batches(data):
            loss = (ddp(x) - x).pow(2).mean()
            run.backward(loss)
            if run.rank == run.world_size - 1 and not run.group.generation and os.path.exists(DIE):
                os.kill(os.getpid(), 9)
            time.sleep(0.02)
            run.step(opt, loss=loss, odd=float("nan"))
            if run.group.broadcast(os.path.exists(END)):
                return


phalanx.main(train)
