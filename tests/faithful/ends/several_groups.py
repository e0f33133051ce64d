import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

others = [dist.new_group() for _ in range(3)]
second = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=others[0])
for _ in range(3):
    model(torch.randn(8, 16)).sum().backward()
    second(torch.randn(8, 4)).sum().backward()
    for group in others:
        dist.all_reduce(torch.ones(4), group=group)
dist.destroy_process_group(others[1])
