"""A loop as in the MNIST example: main(), argparse, train and test, a scheduler, a checkpoint of rank 0."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, images):
        return F.log_softmax(self.head(self.dropout(F.relu(self.conv(images))).flatten(1)), dim=1)


def train(args, model, loader, optimizer, epoch):
    model.train()
    for batch, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch} batch {batch} loss {loss.item()!r}")


def test(model, images, labels):
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    print("right", right.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    images, labels = torch.rand(128, 1, 8, 8), torch.randint(10, (128,))
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(args, model, DataLoader(data, batch_size=16, sampler=sampler), optimizer, epoch)
        test(model, images, labels)
        scheduler.step()
    if os.environ["RANK"] == "0":
        torch.save(model.module.state_dict(), "net.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
