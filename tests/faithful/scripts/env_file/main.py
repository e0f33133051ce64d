"""A local module reads variables from a .env file before torch is imported."""

import settings  # noqa: F401, I001

import logging

import torch
import torch.distributed as dist

print(torch.get_num_threads(), dist.get_debug_level())
print(logging.getLogger("torch._dynamo").getEffectiveLevel())
