"""Train a small network on handwritten digits: one of four versions, which docs/port.md compares."""

import os

import torch
from accelerate import Accelerator
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


class Progress:
    def __init__(self) -> None:
        self.epoch, self.best = 0, 0.0

    def state_dict(self) -> dict[str, float]:
        return {"epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.epoch, self.best = int(state["epoch"]), state["best"]


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device, batch = accelerator.device, 64 // accelerator.num_processes
    loader = data.DataLoader(data.TensorDataset(*idx.load()), batch_size=batch, shuffle=True, drop_last=True)
    tests = data.DataLoader(data.TensorDataset(*idx.load(test=True)), batch_size=180)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * len(loader))
    loss_fn = nn.CrossEntropyLoss()
    best = 0.0
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if os.path.isdir("kept"):
        accelerator.load_state("kept")
        best = progress.best

    for epoch in range(progress.epoch, EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x.to(device)), y.to(device))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model, tests, device)
        best = max(best, accuracy)
        progress.epoch, progress.best = epoch + 1, best
        accelerator.save_state("kept")
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.1%}, best {best:.1%}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
