"""preempt.py FOLDER [WORD …]: a training that is preempted in its midst. Every committed step is a line in FOLDER/steps.

nofolder    it makes no checkpoints
hang        rank 1 waits for ever before step 6, in what all others do not do
evaluate    each epoch begins with something that takes very long, without a step
workers     data is loaded by other processes
handler     the script has a handler for SIGTERM of its own
slow        the checkpoint takes a second to write
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import phalanx

FOLDER, WORDS = Path(sys.argv[1]), sys.argv[2:]
STEPS = 40


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(160, 6, generator=chance), torch.randn(160, 1, generator=chance)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[place], self.y[place]


def once(name: str) -> bool:
    """Whether nobody has done it before."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def linger(run: phalanx.Run) -> None:
    """Until the test lets it go: so that whatever is sent arrives in mid-training, on however slow a machine."""
    while not (FOLDER / "go on").exists():
        time.sleep(0.01)
        run.barrier()


def slowly(fd: int, sync: object = os.fsync) -> None:
    (FOLDER / "saving").touch()
    time.sleep(1.0)
    sync(fd)  # type: ignore[operator]


def train(run: phalanx.Run) -> None:
    if "slow" in WORDS:
        os.fsync = slowly
    data = run.loader(Numbered(), global_batch=4, shuffle=True, num_workers=2 if "workers" in WORDS else 0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.keep(model=model, opt=opt, data=data, every=1000)
    ddp = run.wrap(model)
    for _ in run.epochs(1):
        for x, y in run.batches(data):
            run.backward(nn.functional.mse_loss(ddp(x), y))
            if "hang" in WORDS and run.steps == 6 and run.rank == 1 and once("hung"):
                run.barrier()
            run.step(opt)
            if run.is_main:
                with open(FOLDER / "steps", "a") as file:
                    file.write(f"{run.steps}\n")
            if run.steps >= 6 and "whole" not in WORDS and not (FOLDER / "go on").exists():
                time.sleep(0.05)
    end = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    (FOLDER / f"end.{run.rank}").write_text(repr(end))


if "handler" in WORDS:
    signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
phalanx.main(train)
print("after the training", flush=True)
