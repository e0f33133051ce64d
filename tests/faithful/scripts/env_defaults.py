"""Variables by setdefault and update before torch is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
os.environ.update(PYTORCH_JIT="0", TORCH_SHOW_CPP_STACKTRACES="1", TORCHDYNAMO_DISABLE="1")

import torch
import torch.distributed as dist


@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


print(torch.get_num_threads(), dist.get_debug_level(), torch.jit._state._enabled.enabled, type(double).__name__)
print(double(torch.ones(2)).tolist(), torch.utils.get_cpp_backtrace() != "")
