"""Train a small network on handwritten digits: plain.py with DeepSpeed, for docs/how-to/from-deepspeed.md."""

import deepspeed
import torch
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
    deepspeed.init_distributed()
    dataset = data.TensorDataset(*idx.load())
    tests = data.DataLoader(data.TensorDataset(*idx.load(test=True)), batch_size=180)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = EPOCHS * (len(dataset) // 64)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    loss_fn = nn.CrossEntropyLoss()
    config = {"train_batch_size": 64, "gradient_clipping": 1.0, "dataloader_drop_last": True}
    model, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, training_data=dataset, config=config
    )
    device, start, best = model.device, 0, 0.0
    path, kept = model.load_checkpoint("kept")
    if path is not None:
        start, best = kept["epoch"], kept["best"]

    for epoch in range(start, EPOCHS):
        loader.data_sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_fn(model(x.to(device)), y.to(device))
            model.backward(loss)
            model.step()
        accuracy = evaluate(model, tests, device)
        best = max(best, accuracy)
        model.save_checkpoint("kept", client_state={"epoch": epoch + 1, "best": best})
        if model.global_rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.1%}, best {best:.1%}")
    if model.global_rank == 0:
        torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
