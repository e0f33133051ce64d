import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(8, 16)).square().sum().backward()
    optimizer.step()
dist.destroy_process_group()
