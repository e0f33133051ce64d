"""python examples/digits_plain.py: handwritten digits, in one process; `diff` it with digits_ddp.py and digits.py"""

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


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in images.split(500)])
    model.train()
    return float((guesses == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", metavar="DIR", help="MNIST's IDX files; without it the digits that come with phalanx")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = TensorDataset(*idx.load(options.data))
    images, labels = (t.to(device) for t in idx.load(options.data, test=True))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = accuracy(model, images, labels)
        print(f"epoch {epoch + 1}: {right:.1%} of {len(labels)} new digits are correct")


if __name__ == "__main__":
    main()
