"""DistributedDataParallel until the end, with the group destroyed."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(rank)
for step in range(5):
    loss = model(torch.randn(8, 10, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
print(model.module.weight.sum().item())
dist.destroy_process_group()
print("done")
