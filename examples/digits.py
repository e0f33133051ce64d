"""python examples/digits.py, or phalanx run -g 2 --cpu examples/digits.py, torchrun, srun, mpirun: the same script

What digits_plain.py does, on as many ranks as there are; `diff` shows the few lines that make it so. With
`--checkpoints DIR` before the script, a run that was killed goes on where it was, on any number of ranks.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.demo import idx


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


def train(run: phalanx.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", metavar="DIR", help="MNIST's IDX files; without it the digits that come with phalanx")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    loader = run.loader(TensorDataset(*idx.load(options.data)), global_batch=64, shuffle=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.keep(model=model, optimizer=optimizer, loader=loader)
    ddp = run.wrap(model)
    for epoch in run.epochs(options.epochs):
        for x, y in run.batches(loader):
            loss = nn.functional.cross_entropy(ddp(x), y)
            run.backward(loss)
            run.step(optimizer, loss=loss)
        run.print(f"epoch {epoch}  loss {run.mean(loss):.3f}")

    images, labels = idx.load(options.data, test=True)
    with torch.no_grad():
        right = (ddp(images.to(run.device)).argmax(1) == labels.to(run.device)).float().mean()
    run.print(f"{right:.1%} of {len(labels)} digits it has never seen are read right")


if __name__ == "__main__":
    phalanx.main(train)
