"""python examples/resnet.py, or phalanx run -g 2 examples/resnet.py, torchrun, srun, mpirun: the same script

What resnet_plain.py does, on as many ranks as there are; `diff` shows the few lines that make it so.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.demo import idx


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.second(self.first(x)) + self.around(x))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Upsample((16, 16), mode="bilinear"),
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def train(run: phalanx.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", metavar="DIR", help="MNIST's IDX files; without it the digits that come with phalanx")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="what it computes in; the parameters stay fp32")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    options = parser.parse_args()

    data = TensorDataset(*idx.load(options.data))
    loader = run.loader(data, global_batch=64, shuffle=True)
    test = run.loader(TensorDataset(*idx.load(options.data, test=True)), batch_size=500, train=False)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    run.keep(model, optimizer, loader)
    ddp = run.wrap(model, precision=options.precision, compile=options.compile)

    def measure(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"right": ddp(x).argmax(1) == y}

    for epoch in run.epochs(options.epochs):
        for x, y in run.batches(loader):
            loss = nn.functional.cross_entropy(ddp(x), y)
            run.backward(loss)
            run.step(optimizer, loss=loss)
        found = run.evaluate(test, measure)  # of all ranks, each image once
        run.print(f"epoch {epoch + 1}: {found['right']:.1%} of {found['samples']} new images are recognized")


if __name__ == "__main__":
    phalanx.main(train)
