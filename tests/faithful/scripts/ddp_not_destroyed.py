"""DistributedDataParallel, the group never destroyed."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(10, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(steps):
    for step in range(steps):
        loss = model(torch.randn(8, 10)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


train(5)
print([parameter.detach().norm().item() for parameter in model.parameters()])
