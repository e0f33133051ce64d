"""snapshot.py FOLDER HOW FAULTS: a training whose ranks die: [[step, rank], …] as JSON, each once.
[step, rank, "node"]: someone will kill its whole node.

ddp    phalanx.main, and a wait after each step until the snapshot is there
saved  the same, and until the checkpoint is
init   without phalanx.main: all ranks are started again
long   waits forever after the first snapshot
fsdp   with shards

At the end each rank writes where it had begun in each generation, and its parameters, to FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx

FOLDER, HOW, FAULTS = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])


def die(run: phalanx.Run) -> None:
    for number, (step, rank, *node) in enumerate(FAULTS):
        if (step, rank) == (run.steps, run.rank):
            try:
                os.close(os.open(FOLDER / f"fault {number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            at_once = [other for other, fault in enumerate(FAULTS) if fault[0] == step]
            while not all((FOLDER / f"fault {other}").exists() for other in at_once):  # all die together
                time.sleep(0.001)
            if not node:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


def train(run: phalanx.Run) -> None:
    chance = torch.Generator().manual_seed(5)
    data = run.loader(
        TensorDataset(torch.randn(96, 6, generator=chance), torch.randn(96, 1, generator=chance)),
        global_batch=12,
        shuffle=True,
    )
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Dropout(0.0 if HOW == "fsdp" else 0.2), nn.Linear(17, 1))
    wrapped = run.wrap(model, "fsdp") if HOW == "fsdp" else None
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.keep(model=model, opt=opt, data=data)
    with open(FOLDER / f"begun.{run.rank}", "a") as file:
        file.write(f"{run.steps} ")
    wrapped = wrapped or run.wrap(model)
    for _ in run.epochs(2):
        for x, y in run.batches(data):
            die(run)
            run.backward(nn.functional.mse_loss(wrapped(x), y))
            run.step(opt)
            if run._snapshots.snapshots is not None:
                run._snapshots.snapshots.wait()
            if HOW == "saved" and run._checkpoints.checkpoints is not None:
                run._checkpoints.checkpoints.wait()
            if HOW == "long" and run.steps == 6:
                run.print("waits")
                signal.pause()
    whole = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().tolist()
        for name, value in model.state_dict().items()
    }
    (FOLDER / f"end.{run.rank}").write_text(json.dumps([run.steps, whole]))


if HOW == "init":
    train(phalanx.Run(phalanx.init()))
else:
    phalanx.main(train)
