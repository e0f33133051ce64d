"""kept_first.py FOLDER HOW STEP: `run.keep` comes before `run.wrap`, and one of two sharded models is wrapped late.

HOW: fsdp, hsdp. At STEP, rank 1 kills itself in the middle of the next step; -1: it does not. The loop is a plain one.
Each rank writes what is restored between `run.keep` and `run.wrap`, and then; at the end, the state of everything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import phalanx

FOLDER, HOW, STEP = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def whole(value: torch.Tensor) -> Any:
    return (value.full_tensor() if isinstance(value, DTensor) else value).tolist()


def train(run: phalanx.Run) -> None:
    torch.manual_seed(3)
    student, critic, teacher = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(6, 4)
    opts = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (student, critic)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opts[0], 0.9)
    run.keep(student=student, critic=critic, teacher=teacher, first=opts[0], second=opts[1], slower=scheduler, count=0)

    def record() -> list[Any]:
        shards = [isinstance(one["exp_avg"], DTensor) for opt in opts for one in opt.state.values()]
        return [run.steps, run.state["count"], teacher.bias.tolist(), scheduler.last_epoch, shards]

    found = [record()]
    net = run.wrap(student, HOW)
    found.append(record())
    other = run.wrap(critic, HOW)
    found.append(record())
    with open(FOLDER / f"begun.{run.rank}", "a") as file:
        file.write(json.dumps(found) + "\n")
    while run.steps < 6:
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * run.steps + run.rank))
        target = teacher(x).detach()
        loss = (other(net(x)) - target).square().mean()
        if (run.steps, run.rank) == (STEP, 1) and not (FOLDER / "fault").exists():
            if run._snapshots.snapshots is not None:
                run._snapshots.snapshots.wait()
            (FOLDER / "fault").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        run.backward(loss)
        run.step(opts[0], commit=False, scheduler=scheduler)
        with torch.no_grad():
            teacher.bias += 1.0  # as an average would be: on every rank alike
        run.state["count"] += 1
        run.step(opts[1])
    parts = [*student.state_dict().values(), *critic.state_dict().values(), *teacher.state_dict().values()]
    end = [run.state["count"], scheduler.get_last_lr(), list(map(whole, parts))]
    (FOLDER / f"end.{run.rank}").write_text(json.dumps(end))


phalanx.main(train)
