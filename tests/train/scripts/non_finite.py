"""non_finite.py FOLDER BAD [WORD …]: a training in which the samples BAD (a JSON list) are NaN.

At the end each rank writes its parameters, buffers and committed samples to FOLDER.

ddp, fsdp, hsdp  how the model is wrapped. Default: ddp
oracle           the samples are finite, and the script itself leaves their batches out
mean             the loss is given to run.step alone, as the mean of all ranks
plain            loss.backward() in place of run.backward(loss)
gradients        the loss is finite, and its gradients are not
catch            what run.step raises is caught, and the next batch is read
poison           after step 5 a parameter is NaN
kill             rank 1 dies after step 5, once
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import phalanx
from phalanx.errors import NonFiniteError

FOLDER, BAD = Path(sys.argv[1]), json.loads(sys.argv[2])
WORDS = sys.argv[3:]
SAMPLES, EPOCHS = 48, 2


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(SAMPLES, 6, generator=chance), torch.randn(SAMPLES, 1, generator=chance)
        if "oracle" not in WORDS and "gradients" not in WORDS:
            self.x[BAD] = torch.nan

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[place], self.y[place], place


def train(run: phalanx.Run) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    data = run.loader(Numbered(), global_batch=8)
    done: list[int] = []
    run.keep(model, opt, data, done=done)
    net = run.wrap(model, next((word for word in WORDS if word in ("fsdp", "hsdp")), "ddp"))
    for _ in run.epochs(EPOCHS):
        for x, y, places in run.batches(data):
            before = [buffer.clone() for buffer in model.buffers()]
            bad = bool(run.group.sum(sum(place in BAD for place in places.tolist())))
            loss = nn.functional.mse_loss(net(x), y)
            if bad and "gradients" in WORDS:
                loss = loss + torch.sqrt(net(x).sum() * 0)  # 0, with an infinite derivative times 0
            loss.backward() if "plain" in WORDS else run.backward(loss)
            if bad and "oracle" in WORDS:
                opt.zero_grad(set_to_none=True)
                with torch.no_grad():
                    for buffer, old in zip(model.buffers(), before, strict=True):
                        buffer.copy_(old)
            metrics = {"loss": run.group.mean(loss)} if "mean" in WORDS else {} if "plain" in WORDS else {"loss": loss}
            try:
                update = run.step(opt, **metrics)
            except NonFiniteError:
                if "catch" not in WORDS:
                    raise
                continue
            if update.done:
                run.state["done"] = [*run.state["done"], run.steps]
            if run.steps == 5 and run.rank == 1 and "kill" in WORDS and not run.group.generation:
                os.kill(os.getpid(), signal.SIGKILL)
            if run.steps == 5 and "poison" in WORDS:
                with torch.no_grad():
                    next(model.parameters()).fill_(torch.nan)
    whole = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}
    end = {name: each.tolist() for name, each in whole.items()}
    (FOLDER / f"end.{run.rank}").write_text(json.dumps([run.steps, run.state["done"], end]))


phalanx.main(train)
