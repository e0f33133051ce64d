"""preempt.py FOLDER [WORD …]: 40 steps, of which those after the 6th wait until FOLDER has a file "continue".

hang       rank 1 waits in a collective that the others do not do, after step 6
stuck      rank 1 computes there, and comes to no end
slow       a checkpoint takes a while to write, and FOLDER has a file "saving" meanwhile
workers    data is loaded by other processes
raw        data is read without phalanx
alone      the script has its own data, and no loop of phalanx
often      a checkpoint of every third step
badly      whatever has happened before, the process ends with code 3
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import phalanx

FOLDER, WORDS = Path(sys.argv[1]), sys.argv[2:]


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(160, 6, generator=chance), torch.randn(160, 1, generator=chance)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[place], self.y[place]


class Counting(nn.Module):
    """Counts its forwards, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


def once(name: str) -> bool:
    """Return whether it is done for the first time."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def slowly(fd: int, sync: Any = os.fsync) -> None:
    (FOLDER / "saving").touch()
    time.sleep(0.3)
    sync(fd)


def train(run: phalanx.Run) -> None:
    if "slow" in WORDS:
        os.fsync = slowly
    data = run.loader(Numbered(), global_batch=4, shuffle=True, num_workers=2 if "workers" in WORDS else 0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1), Counting())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.checkpoints(every=3 if "often" in WORDS else 1000)
    run.keep(model=model, opt=opt, data=data)
    ddp = run.wrap(model)
    for _ in run.epochs(1):
        if "alone" in WORDS:
            batches: Any = iter(lambda: Numbered()[run.steps : run.steps + 4] if run.steps < 40 else None, None)
        else:
            batches = data if "raw" in WORDS else run.batches(data)
        for x, y in batches:
            run.backward(nn.functional.mse_loss(ddp(x), y))
            run.step(opt)
            with open(FOLDER / f"steps.{run.rank}", "a") as file:
                file.write(f"{run.steps} {os.getpid()}\n")
            if run.steps == 6 and run.rank == 1:
                if "hang" in WORDS and once("hung"):
                    run.group.barrier()
                while "stuck" in WORDS:
                    torch.rand(1000)
            if run.steps >= 6 and not (FOLDER / "continue").exists():
                time.sleep(0.05)
    assert int(model[-1].count) == run.steps == 40
    end = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    (FOLDER / f"end.{run.rank}").write_text(repr(end))


if "badly" in WORDS:
    atexit.register(os._exit, 3)
phalanx.main(train)
print("after the training", flush=True)
