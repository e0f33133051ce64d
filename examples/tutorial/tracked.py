"""docs/how-to/trackers.md: send metrics to a function. `phalanx run -g 2 --cpu tracked.py`."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.demo import idx


def send(step: int, values: dict[str, float]) -> None:
    with open("sent.csv", "a") as file:
        for name, value in values.items():
            file.write(f"{step},{name},{value:.4g}\n")


def train(run: phalanx.Run) -> None:
    loader = run.loader(TensorDataset(*idx.load()), global_batch=64, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.keep(model, optimizer, loader)
    model = run.wrap(model)
    for epoch in run.epochs(2):
        for x, y in run.batches(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer, loss=loss)
        run.log(epochs_done=epoch + 1)


if __name__ == "__main__":
    phalanx.main(train, log_to=send)
