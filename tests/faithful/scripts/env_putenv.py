"""os.putenv and the C library's setenv before torch is imported: os.environ does not know of them."""

import ctypes
import os

os.putenv("OMP_NUM_THREADS", "2")
ctypes.CDLL(None).setenv(b"TORCH_DISTRIBUTED_DEBUG", b"DETAIL", 1)

import torch
import torch.distributed as dist

print(os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), dist.get_debug_level())
