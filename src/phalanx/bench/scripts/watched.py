"""Trains until it is ended; each rank keeps, in a file of its own, how far it is: step, time, CPU seconds.

python watched.py '{"width": …, "batch": …, "file": PREFIX}'
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx

_SAMPLES = 1 << 16


def train(run: phalanx.Run, told: dict[str, Any]) -> None:
    width = told["width"]
    progress = os.open(f"{told['file']}.{run.rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # What is asked for cannot be learnt: gradients that vanish would make the processor slow, sooner or later.
    data = TensorDataset(torch.ones(1, width).expand(_SAMPLES, -1), torch.randn(_SAMPLES, 1).expand(-1, 8))
    loader = run.loader(data, batch_size=told["batch"])
    run.keep(model=model, opt=opt, loader=loader)
    ddp = run.wrap(model)
    for _ in run.epochs(1 << 30):
        for x, y in run.batches(loader):
            loss = nn.functional.mse_loss(ddp(x), y)
            run.backward(loss)
            run.step(opt, loss=loss)
            # One call, so that a reader has the three of one step. The clock is that of all processes.
            os.pwrite(progress, struct.pack("ddd", run.steps, time.monotonic(), time.process_time()), 0)


if __name__ == "__main__":
    TOLD = json.loads(sys.argv[1])
    phalanx.main(lambda run: train(run, TOLD), device="cpu")
