"""python examples/digits_plain.py: handwritten digits in one process; `diff` it with digits_ddp.py"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.demo import idx


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", metavar="DIR", help="MNIST's IDX files; without it the digits that come with phalanx")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = TensorDataset(*idx.load(options.data))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.3f}")

    images, labels = idx.load(options.data, test=True)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    print(f"{right:.1%} of {len(labels)} digits it has never seen are read right")


if __name__ == "__main__":
    main()
