"""Train until terminated; each rank writes its progress (step, time, CPU seconds) to its own file.

python watch.py '{"width": …, "batch": …, "file": PREFIX}'
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


def train(run: phalanx.Run, config: dict[str, Any]) -> None:
    """Train without end."""
    width = config["width"]
    progress = os.open(f"{config['file']}.{run.rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # The targets are random: gradients that vanish would become denormal numbers, which are slow.
    data = TensorDataset(torch.ones(1, width).expand(_SAMPLES, -1), torch.randn(_SAMPLES, 1).expand(-1, 8))
    loader = run.loader(data, batch_size=config["batch"])
    run.keep(model=model, opt=opt, loader=loader)
    ddp = run.wrap(model)
    for _ in run.epochs(1 << 30):
        for x, y in run.batches(loader):
            loss = nn.functional.mse_loss(ddp(x), y)
            run.backward(loss)
            run.step(opt, loss=loss)
            # One call, so that a reader gets the three values of one step. All processes share this clock.
            os.pwrite(progress, struct.pack("ddd", run.steps, time.monotonic(), time.process_time()), 0)


if __name__ == "__main__":
    CONFIG = json.loads(sys.argv[1])
    phalanx.main(lambda run: train(run, CONFIG), device="cpu")
