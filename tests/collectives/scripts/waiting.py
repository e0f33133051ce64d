"""Rank 1 does not come: rank 0 waits as long as it was told, and no longer."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.collectives import registration

registration.register()
dist.init_process_group("mpi", timeout=timedelta(seconds=1))
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(600)  # the job is ended meanwhile
for _ in range(2):
    try:
        dist.all_reduce(torch.ones(1000))
    except dist.DistBackendError as error:
        print(f"rank 0: {type(error).__name__}: {error}", flush=True)
