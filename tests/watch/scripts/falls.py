"""falls.py FOLDER: a short training whose rank 1 is killed once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import torch
from torch import nn

import phalanx

FALL = 12  # before this step


def train(run: phalanx.Run) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 4)
    data = run.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), global_batch=8, shuffle=True)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    run.keep(model=model, opt=opt, data=data)
    model = run.wrap(model)
    for _ in run.epochs(4):
        for inputs, wanted in run.batches(data):
            if run.steps + 1 == FALL and run.rank == 1:
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(f"{sys.argv[1]}/fallen", os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.mse_loss(model(inputs), wanted)
            run.backward(loss)
            run.step(opt, loss=loss)
    print("learned <b>enough</b>, token=hunter2")


phalanx.main(train)
