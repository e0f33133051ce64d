import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
step = torch.compile(lambda x: model(x).square().mean(), backend="eager")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    step(torch.randn(8, 16)).backward()
    optimizer.step()
dist.destroy_process_group()
