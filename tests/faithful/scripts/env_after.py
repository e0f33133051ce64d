"""Variables that torch reads when it needs them, not when it is imported."""

import os

import torch
import torch.distributed as dist

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
print(dist.get_debug_level())
dist.set_debug_level_from_env()
print(dist.get_debug_level(), torch.get_num_threads())
torch.set_num_threads(2)
print(torch.get_num_threads(), torch.get_num_interop_threads())
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
print(torch.ones(1).dtype, torch.are_deterministic_algorithms_enabled())
