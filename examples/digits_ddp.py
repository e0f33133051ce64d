"""phalanx run -g 2 examples/digits_ddp.py: the digits on many ranks; `diff` it with digits_plain.py"""

import argparse
import os

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


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in images.split(500)])
    model.train()
    return float((guesses == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", metavar="DIR", help="MNIST's IDX files; without it the digits that come with phalanx")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    data = TensorDataset(*idx.load(options.data))
    images, labels = (t.to(device) for t in idx.load(options.data, test=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = accuracy(model, images, labels)
        print(f"rank {rank} of {world}, epoch {epoch + 1}: {right:.1%} of {len(labels)} new digits are correct")


if __name__ == "__main__":
    dist.init_process_group()  # nccl between GPUs, gloo between CPUs
    main()
    dist.destroy_process_group()
