"""Step 1 of docs/tutorials/ddp.md: train in one process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.demo import idx

EPOCHS = 8


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*idx.load()), batch_size=64, shuffle=True, drop_last=True)
    images, labels = (tensor.to(device) for tensor in idx.load(test=True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            correct = (model(images).argmax(1) == labels).float().mean().item()
        print(f"epoch {epoch}: {correct:.1%} of the test digits are correct")


if __name__ == "__main__":
    main()
