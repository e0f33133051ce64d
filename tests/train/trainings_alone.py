"""A run of one process, and a small training in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import phalanx


def alone(folder: Path) -> phalanx.Run:
    run = phalanx.Run(phalanx.init(device="cpu"))
    run.group.folder = str(folder)
    return run


def numbers(count: int = 10) -> TensorDataset:
    x = torch.arange(count * 3, dtype=torch.float32).reshape(count, 3) / count
    return TensorDataset(x, x.sum(1, keepdim=True))


class Training:
    """A model, its optimizer and the step of a loop."""

    def __init__(self, run: phalanx.Run, **options: Any) -> None:
        self.run = run
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.net = run.wrap(self.model, **options)

    def step(self, x: torch.Tensor, y: torch.Tensor, **options: Any) -> bool:
        loss = mse_loss(self.net(x), y)
        self.run.backward(loss)
        return bool(self.run.step(self.opt, loss=loss, **options).done)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
