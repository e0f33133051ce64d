import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    for step in range(10):
        loss = model(torch.randn(8, 16)).square().sum()
        loss.backward()
        if step == 3:
            raise FloatingPointError("loss is nan")


train()
