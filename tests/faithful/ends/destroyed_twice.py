import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

try:
    model(torch.randn(8, 16)).sum().backward()
finally:
    dist.destroy_process_group()

try:
    dist.destroy_process_group()
except (AssertionError, ValueError) as error:
    print("already destroyed", type(error).__name__)
