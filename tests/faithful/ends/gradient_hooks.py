import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
seen = []
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.norm()))
for _ in range(3):
    model(torch.randn(8, 16)).sum().backward()
print(len(seen))
