"""A training that may be killed: `resume.py FOLDER PLAY`.

Every rank records the samples before it trains on them, and each process where it continues; rank 0 exports the
parameters at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

import phalanx

FOLDER, PLAY = Path(sys.argv[1]), json.loads(sys.argv[2])
LENGTH, GLOBAL, EPOCHS = 51, 12, 3


class Points:
    """With some noise, drawn whenever a sample is read."""

    def __init__(self) -> None:
        self.x = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        x = self.x[index]
        return index, x + PLAY["noise"] * torch.randn(6), (x**2).sum(0, keepdim=True)


class PointStream(IterableDataset):
    """The same in order, with a position that can be saved."""

    def __init__(self) -> None:
        self.points = Points()
        self.at = 0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        while self.at < LENGTH:
            self.at += 1
            yield self.points[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train(run: phalanx.Run) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(PLAY["dropout"]), nn.Linear(16, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = run.loader(
        PointStream() if PLAY["stream"] else Points(),
        global_batch=GLOBAL // PLAY["accumulate"],
        shuffle=not PLAY["stream"],
        drop_last=False,
        num_workers=PLAY["workers"],
    )
    run.keep(model=model, opt=opt, data=data)
    net = run.wrap(model, PLAY["how"], accumulate=PLAY["accumulate"])
    notes = os.open(FOLDER / f"{PLAY['name']}-{run.rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(**what: Any) -> None:
        os.write(notes, (json.dumps(what) + "\n").encode())  # one write: a note is complete, or absent

    def die(where: str) -> None:
        if PLAY["kill"] == [run.rank, run.steps, where]:
            try:
                (FOLDER / f"{PLAY['name']}-killed").touch(exist_ok=False)
            except FileExistsError:
                return  # an earlier process has done it
            os.kill(os.getpid(), signal.SIGKILL)

    note(resumed=run.steps, workers_known=data.state_dict()["workers"] is not None)
    for epoch in run.epochs(EPOCHS):
        for index, x, y in run.batches(data):
            die("forward")
            loss = nn.functional.mse_loss(net(x), y)
            run.backward(loss)
            die("step")
            note(step=run.steps + 1, epoch=epoch, samples=index[: data.last_count].tolist())
            run.step(opt, clip=1.0, loss=loss)
            die("checkpoint")
    net.export(FOLDER / f"{PLAY['name']}.safetensors")
    run.print(f"done after {run.steps} steps")


phalanx.main(train)
