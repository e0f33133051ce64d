"""several_updates.py FOLDER HOW [STEP RANK]: two models with an optimizer each, and two updates per step. After STEP
steps, RANK kills itself once between the updates of the next one. A hook of the second optimizer averages its
parameters.

Each rank writes the steps at which it entered `train`; at the end, its parameters and their averages.
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
from torch.utils.data import TensorDataset

import phalanx

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]
FAULT = tuple(map(int, sys.argv[3:]))


def die(run: phalanx.Run) -> None:
    if (run.steps, run.rank) == FAULT and not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Average:
    """An average of parameters, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, *_: Any) -> None:
        for name, value in self.model.named_parameters():
            self.values[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.values[name].copy_(value)


def whole(tensor: Any) -> list[float]:
    values = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return values.detach().flatten().tolist()  # type: ignore[no-any-return]


def train(run: phalanx.Run) -> None:
    chance = torch.Generator().manual_seed(5)
    data = run.loader(TensorDataset(torch.randn(96, 6, generator=chance)), global_batch=12, shuffle=True)
    first, second = nn.Linear(6, 4), nn.Linear(4, 6)
    opts = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]
    wrapped = [run.wrap(model, HOW) for model in (first, second)]
    average = Average(second)
    run.keep(first=first, second=second, opt_first=opts[0], opt_second=opts[1], data=data, average=average)
    opts[1].register_step_post_hook(average.update)
    with open(FOLDER / f"begun.{run.rank}", "a") as file:
        file.write(f"{run.steps} ")
    for _ in run.epochs(2):
        for (x,) in run.batches(data):
            run.backward(wrapped[0](x).square().mean())
            run.step(opts[0], commit=False)
            die(run)
            run.backward(nn.functional.mse_loss(wrapped[1](wrapped[0](x).detach()), x))
            run.step(opts[1])
            if run._snapshots.snapshots is not None:
                run._snapshots.snapshots.wait()
    values = [whole(one) for one in (*first.parameters(), *second.parameters(), *average.values.values())]
    (FOLDER / f"end.{run.rank}").write_text(json.dumps(values))


phalanx.main(train)
