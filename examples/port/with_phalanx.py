"""Train a small network on handwritten digits: one of four versions, which docs/port.md compares."""

import torch
from torch import nn
from torch.utils import data

import phalanx
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


def main(run: phalanx.Run) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = data.DataLoader(data.TensorDataset(*idx.load()), batch_size=64, shuffle=True, drop_last=True)
    loader = run.loader(loader, global_batch=64)
    tests = data.DataLoader(data.TensorDataset(*idx.load(test=True)), batch_size=180)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * len(loader))
    loss_fn = nn.CrossEntropyLoss()
    best = 0.0
    run.keep(model, optimizer, scheduler, loader, best=best)
    best = run.state["best"]
    model = run.wrap(model)

    for epoch in run.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x.to(device)), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.step(optimizer, scheduler=scheduler, loss=loss)
        accuracy = evaluate(model, tests, device)
        best = max(best, accuracy)
        run.state["best"] = best
        run.print(f"epoch {epoch}: accuracy {accuracy:.1%}, best {best:.1%}")
    model.export("model.pt")


if __name__ == "__main__":
    phalanx.main(main)
