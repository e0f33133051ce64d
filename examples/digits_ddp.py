"""phalanx run -g 2 examples/digits_ddp.py: the digits on many ranks; `diff` it with digits_plain.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from phalanx.demo import idx


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", metavar="DIR", help="MNIST's IDX files; without it the digits that come with phalanx")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(*idx.load(options.data))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}")

    images, labels = idx.load(options.data, test=True)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    print(f"rank {rank} of {world}: {right:.1%} of {len(labels)} digits it has never seen are read right")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
