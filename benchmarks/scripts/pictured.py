"""A training in which a rank is killed and another one is stuck in its data, for the pictures of the documentation."""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import phalanx

SAMPLES, WIDTH = 4800, 256


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--kill", type=int, nargs=2, default=(-1, 0), metavar=("RANK", "STEP"))
    parser.add_argument("--stuck", type=int, nargs=3, default=(-1, 0, 0), metavar=("RANK", "STEP", "SECONDS"))
    return parser.parse_args()


class Waves(Dataset):  # type: ignore[misc]
    """Sums of sines, read slowly."""

    stuck = 0.0  # seconds that the next sample takes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002 + self.stuck)
        self.stuck = 0.0
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x[:8].sin().sum().reshape(1)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=options.lr)


def train(run: phalanx.Run) -> None:
    """Train, and have the accident that the options name."""
    dataset = Waves()
    loader = run.loader(dataset, batch_size=8, shuffle=True)
    model, optimizer = run.once(make)
    run.keep(model, optimizer, loader)
    ddp = run.wrap(model)
    for epoch in run.epochs(options.epochs):
        for x, y in run.batches(loader):
            loss = nn.functional.mse_loss(ddp(x), y)
            run.backward(loss)
            run.step(optimizer, loss=loss)
            if (run.rank, run.steps) == tuple(options.kill) and run.group.generation == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if (run.rank, run.steps) == tuple(options.stuck[:2]):
                dataset.stuck = options.stuck[2]
        run.print(f"epoch {epoch + 1}: loss {loss:.4f}")


if __name__ == "__main__":
    options = parse()
    phalanx.main(train, hyperparameters=vars(options))
