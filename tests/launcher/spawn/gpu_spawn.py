"""On a machine with a GPU: `python tests/launcher/spawn/gpu_spawn.py`. A caller that has initialized CUDA can spawn."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.errors import UsageError
from phalanx.launcher.spawn.spawn import must_not_fork, spawn


def on_the_gpu(x: float) -> tuple[float, str]:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    tensor = torch.full((1,), x, device=device)
    if dist.get_backend() == "nccl":
        dist.all_reduce(tensor)
    return float(tensor), dist.get_backend()


if __name__ == "__main__":
    assert must_not_fork() == "", must_not_fork()
    forked = spawn(on_the_gpu, 1, args=(2.0,), backend="nccl")
    print("forked, then CUDA:", forked)
    assert forked == [(2.0, "nccl")]
    torch.ones(1, device="cuda")
    assert "CUDA" in must_not_fork(), must_not_fork()
    try:
        spawn(on_the_gpu, 1, args=(2.0,), fresh=False)
    except UsageError as error:
        print("refused:", error)
    else:
        raise AssertionError("a process with CUDA was forked")
    fresh = spawn(on_the_gpu, 1, args=(3.0,), backend="nccl")
    print("fresh, nccl:", fresh)
    assert fresh == [(3.0, "nccl")]
    both = spawn(on_the_gpu, 2, args=(4.0,), backend="gloo")
    print("fresh, gloo:", both)
    assert both == [(4.0, "gloo")] * 2
    print("all right")
