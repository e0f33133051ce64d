"""Collectives of objects, including objects of classes in __main__."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Sample:
    rank: int
    weights: torch.Tensor


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
everybody = [None] * size
dist.all_gather_object(everybody, Sample(rank, torch.full((2,), rank / 3)))
print(everybody)
news = [{"lr": 0.1, "from": 0}, Sample(9, torch.zeros(1))] if rank == 0 else [None, None]
dist.broadcast_object_list(news)
print(news)
mine = [None]
dist.scatter_object_list(mine, [f"for {n}" for n in range(size)] if rank == 0 else None)
collected = [None] * size if rank == 0 else None
dist.gather_object(("from", rank), collected)
print(mine, collected)
dist.monitored_barrier()
dist.destroy_process_group()
