"""Handwritten digits on as many ranks as there are: what `phalanx demo` trains."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.demo import idx


def train(run: phalanx.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--fail", action="store_true", help="rank 1 meets an error, as ranks do")
    options = parser.parse_args()

    data = run.loader(TensorDataset(*idx.load()), global_batch=64, shuffle=True)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(512, 10)),
    )
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    slower = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.01, total_iters=options.epochs * len(data))
    run.keep(model=model, opt=opt, slower=slower, data=data)
    ddp = run.wrap(model)
    for epoch in run.epochs(options.epochs):
        for x, y in run.batches(data):
            loss = nn.functional.cross_entropy(ddp(x), y)
            run.backward(loss)
            run.step(opt, scheduler=slower, loss=loss)
            if options.fail and run.rank == 1 and run.steps == 30:
                raise RuntimeError("this rank has read a broken sample")
        run.print(f"epoch {epoch}  loss {run.mean(loss):.3f}")

    images, labels = idx.load(test=True)
    with torch.no_grad():
        right = (ddp(images.to(run.device)).argmax(1) == labels.to(run.device)).float().mean()
    run.print(f"{right:.1%} of {len(labels)} digits it has never seen are read right")


if __name__ == "__main__":
    phalanx.main(train)
