"""Train on handwritten digits, on any number of ranks.

Run it with `python examples/digits.py`, `phalanx run -g 2 examples/digits.py`, torchrun, srun or mpirun. It is
digits_plain.py with a few changed lines: compare the two with `diff`. A run that was started with `--checkpoints DIR`
before the script resumes after it was killed, on any number of ranks. `phalanx demo` runs a copy of this file.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.demo import idx


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that the model gets right."""
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in images.split(500)])
    model.train()
    return float((guesses == labels).float().mean())


def train(run: phalanx.Run) -> None:
    """Train on one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", metavar="DIR", help="MNIST's IDX files; without it the digits that come with phalanx")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--at-least", type=float, default=0, metavar="PERCENT", help="else it fails")
    options = parser.parse_args()

    data = TensorDataset(*idx.load(options.data))
    images, labels = (t.to(run.device) for t in idx.load(options.data, test=True))
    loader = run.loader(data, global_batch=64, shuffle=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.keep(model, optimizer, loader)
    ddp = run.wrap(model)
    for epoch in run.epochs(options.epochs):
        for x, y in run.batches(loader):
            loss = nn.functional.cross_entropy(ddp(x), y)
            run.backward(loss)
            run.step(optimizer, loss=loss)
        right = accuracy(ddp, images, labels)
        run.print(f"epoch {epoch + 1}: {right:.1%} of {len(labels)} new digits are correct")
    if options.at_least > 100 * accuracy(ddp, images, labels):
        raise SystemExit(f"less than {options.at_least:g}% are correct")


if __name__ == "__main__":
    phalanx.main(train)
