"""Step 2 of docs/tutorials/ddp.md: the same training on several ranks, with plain PyTorch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from phalanx.demo import idx

EPOCHS = 8


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    digits = TensorDataset(*idx.load())
    sampler = DistributedSampler(digits, shuffle=True, drop_last=True)
    loader = DataLoader(digits, batch_size=64 // dist.get_world_size(), sampler=sampler, drop_last=True)
    images, labels = (tensor.to(device) for tensor in idx.load(test=True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            correct = (model(images).argmax(1) == labels).float().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {correct:.1%} of the test digits are correct")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
