"""Every rank says who it is, and all add up their numbers: phalanx run -g 4 examples/hello.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print(f"rank {rank} of {world}: the ranks add up to {total.item():.0f}")
dist.destroy_process_group()
