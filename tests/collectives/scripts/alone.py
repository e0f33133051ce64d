"""A world of one; then as another launcher starts it, and as if mpi4py were not installed."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from phalanx.collectives import registration
from phalanx.collectives.engines import mpi

without = dist.is_mpi_available()
registration.register()
assert dist.is_mpi_available() == without  # accelerate would otherwise use it for CPU ranks
dist.init_process_group("mpi")
part = torch.full((2,), 3.0)
dist.all_reduce(part)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {part[1].item()}", flush=True)
dist.destroy_process_group()
os.environ["WORLD_SIZE"] = "2"
for _ in range(2):
    try:
        dist.init_process_group("mpi")
    except mpi.CallRefused as error:
        print(f"CallRefused: {error}")
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
