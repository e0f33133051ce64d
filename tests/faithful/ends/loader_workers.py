import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
data = TensorDataset(torch.randn(64, 16))
loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True)
batches = iter(loader)
for _ in range(3):
    model(next(batches)[0]).sum().backward()
dist.destroy_process_group()
