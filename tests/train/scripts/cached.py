"""cached.py FOLDER STEP: the forward of a model registers a buffer, and enlarges another: caches, no part of the state.

At STEP, rank 1 kills itself before the forward; -1: it does not. Each rank writes its parameters and buffers at the
end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import phalanx

FOLDER, STEP = Path(sys.argv[1]), int(sys.argv[2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("grown", torch.ones(1), persistent=False)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.full((8,), 2.0), persistent=False)
        self.steps += 1
        if self.steps % 2 == 0:
            self.grown = torch.ones(self.steps)
        return self.last(self.norm(self.layer(x)) * self.cache * self.grown[0])


def make() -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def train(run: phalanx.Run) -> None:
    model, opt = run.once(make)
    run.keep(model, opt)
    net = run.wrap(model)
    while run.steps < 8:
        if (run.steps, run.rank) == (STEP, 1) and not (FOLDER / "fault").exists():
            (FOLDER / "fault").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * run.steps + run.rank))
        run.backward(net(x).square().mean())
        run.step(opt)
    end = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    (FOLDER / f"end.{run.rank}").write_text(json.dumps(end))


phalanx.main(train)
