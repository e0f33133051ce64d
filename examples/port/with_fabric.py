"""Train a small network on handwritten digits: one of four versions, which docs/port.md compares."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils import data

from phalanx.demo import idx

EPOCHS = 4


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, tests: data.DataLoader, device: torch.device) -> float:
    model.eval()
    right = total = 0
    for x, y in tests:
        right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
        total += len(y)
    model.train()
    return right / total


def main() -> None:
    torch.manual_seed(0)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(devices=ranks, num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // ranks, strategy="ddp")
    fabric.launch()
    device, batch = fabric.device, 64 // fabric.world_size
    loader = data.DataLoader(data.TensorDataset(*idx.load()), batch_size=batch, shuffle=True, drop_last=True)
    loader = fabric.setup_dataloaders(loader)
    tests = data.DataLoader(data.TensorDataset(*idx.load(test=True)), batch_size=180)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * len(loader))
    loss_fn = nn.CrossEntropyLoss()
    best = 0.0
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "best": best}
    if os.path.exists("kept.ckpt"):
        fabric.load("kept.ckpt", state)
        best = state["best"]

    for epoch in range(state["epoch"], EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x.to(device)), y.to(device))
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model, tests, device)
        best = max(best, accuracy)
        state["epoch"], state["best"] = epoch + 1, best
        fabric.save("kept.ckpt", state)
        fabric.print(f"epoch {epoch}: accuracy {accuracy:.1%}, best {best:.1%}")
    if fabric.is_global_zero:
        torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
