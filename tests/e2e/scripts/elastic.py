"""elastic.py FOLDER [EPOCHS]: a training that continues, epoch after epoch, until FOLDER/end is there; or for EPOCHS.

Each rank writes which samples it takes for a step, and says when it enters a group. With LAST in the environment a rank
has something to do when the training is over. With BAD in the environment, this node cannot take part: BAD says why.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import phalanx

FOLDER = Path(sys.argv[1])
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else None  # None: no limit
BAD = os.environ.get("BAD", "")
SAMPLES, PAUSE = 88 if BAD == "length" else 96, 0.03


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(SAMPLES, 6, generator=chance), torch.randn(SAMPLES, 1, generator=chance)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[place], self.y[place], place


def train(run: phalanx.Run) -> None:
    data = run.loader(Numbered(), global_batch=12, shuffle=True)
    width = 17 if BAD == "shape" else 16
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.group.on_resize(lambda before, now: run.print(f"resized from {before} to {now}"))
    run.keep(model=model, opt=opt, data=data)
    ddp = run.wrap(model)
    group = f"{run.world_size} by {run.group.backend}, pid {os.getpid()}"
    print(f"generation {run.group.generation}: rank {run.rank} of {group}", flush=True)
    for epoch in run.epochs(1 if BAD == "end" else EPOCHS or 10_000):
        for x, y, places in run.batches(data):
            taken = [run.group.generation, run.world_size, places.tolist()]
            own = FOLDER / f".{os.uname().nodename} {os.getpid()}"  # atomic: this rank may be killed
            own.write_text(json.dumps(taken))
            own.rename(FOLDER / f"{run.steps + 1}.{run.rank}")
            if BAD == "abort":
                os.abort()
            if BAD == "leave":
                sys.exit(0)
            run.backward(nn.functional.mse_loss(ddp(x), y))
            run.step(opt)
            time.sleep(0 if EPOCHS else PAUSE)  # the pace of a training, not a wait for an event
        end = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
        if EPOCHS is not None:
            (FOLDER / f"result.{epoch + 1}").write_text(json.dumps(end))
        elif run.group.broadcast((FOLDER / "end").exists()):
            if run.group.is_main:
                (FOLDER / "result").write_text(json.dumps([epoch + 1, run.steps, end]))
            break


if BAD == "import":
    raise ImportError("this host has no module named tokens")
print("comes to main", flush=True)
phalanx.main(train)
if "LAST" in os.environ:
    time.sleep(1)
    (FOLDER / "last").touch()
