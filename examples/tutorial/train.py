"""Step 3 of docs/tutorials/ddp.md: the same training with phalanx, on any number of ranks."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.demo import idx

EPOCHS = 8


def main(run: phalanx.Run) -> None:
    loader = run.loader(TensorDataset(*idx.load()), global_batch=64, shuffle=True)
    images, labels = (tensor.to(run.device) for tensor in idx.load(test=True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.keep(model, optimizer, loader)
    model = run.wrap(model)
    for epoch in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer, loss=loss)
        with torch.no_grad():
            correct = (model(images).argmax(1) == labels).float().mean().item()
        run.print(f"epoch {epoch}: {correct:.1%} of the test digits are correct")


if __name__ == "__main__":
    phalanx.main(main)
