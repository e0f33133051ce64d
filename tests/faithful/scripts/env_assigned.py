"""Variables assigned before torch is imported."""

import os

os.environ["OMP_NUM_THREADS"] = "2"
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
import torch._dynamo
import torch.distributed as dist

print(torch.get_num_threads(), dist.get_debug_level(), torch._dynamo.config.disable)
dist.init_process_group("gloo")
print(type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))).__name__)
total = torch.ones(2)
dist.all_reduce(total)
print(total.tolist())
dist.destroy_process_group()
