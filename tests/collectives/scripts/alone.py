"""A world of one; and then as if mpi4py were not installed."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from phalanx.collectives import mpi, registration

registration.register()
dist.init_process_group("mpi")
part = torch.full((2,), 3.0)
dist.all_reduce(part)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {part[1].item()}", flush=True)
dist.destroy_process_group()
sys.modules["mpi4py"] = None  # type: ignore[assignment]
try:
    mpi.create()
except mpi.Refused as error:
    print(f"Refused: {error}")
